"""A made-up cluster of round figures, on which times can be had by mental arithmetic."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from amalthea.plan.clusters import Cluster
from amalthea.plan.step_speeds import Assumptions

ROUND = Cluster(
    name="round",
    gpu="made up",
    num_nodes=None,
    gpus_per_node=2,
    peak_tflops=100,
    hbm_gb=10,
    hbm_tb_per_s=1.0,
    intra_gb_per_s=100,
    inter_gb_per_s=10,
    host_gb=10,
    host_link_gb_per_s=20,
    network="",
    scheduler="",
    source="",
)


def exact(**changes: Any) -> Assumptions:
    """Everything at its peak, and nothing takes time but work itself."""
    perfect = {
        f.name: 0.0 if f.name.endswith("_s") or f.name == "matmul_half_flops" else 1.0 for f in fields(Assumptions)
    }
    perfect["unknown_host_link_gb_per_s"] = 20.0
    return Assumptions(**{**perfect, **changes})
