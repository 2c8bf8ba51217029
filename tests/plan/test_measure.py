"""Measuring this machine: figures that a second way of measuring confirms, and refusals."""

from __future__ import annotations

import time

import pytest
import torch

from amalthea.core.errors import ConfigError
from amalthea.plan.clusters import Cluster
from amalthea.plan.events import COMPUTE, Collective, Kernel, Trace
from amalthea.plan.measure import measure_this
from amalthea.plan.step_speeds import Assumptions
from amalthea.plan.stopwatch import Stopwatch
from amalthea.plan.timeline import simulate


def measured(num_processes: int) -> tuple[Cluster, Assumptions, float, float]:
    """With two ceilings: the best of some products and copies in turn."""
    with Stopwatch(num_processes, threads=1) as stopwatch:
        cluster, assumptions = measure_this(stopwatch)
    left, right = torch.randn(768, 768), torch.randn(768, 768)
    source, target = torch.ones(32 << 20), torch.empty(32 << 20)
    products, copies = [], []
    for _ in range(5):
        began = time.perf_counter()
        left @ right
        products.append(time.perf_counter() - began)
        began = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - began)
    return cluster, assumptions, 2 * 768**3 / min(products), 8 * (32 << 20) / min(copies)


def test_it_measures_what_another_clock_measures() -> None:
    cluster, assumptions, flops_per_s, bytes_per_s = measured(1)
    # A machine that others use is uneven: a factor of three tells a wrong unit or count all the same.
    single = cluster.peak_flops_per_s * assumptions.fp32_peak
    assert 1 / 3 < single / flops_per_s < 3
    assert 1 / 3 < cluster.hbm_bytes_per_s / bytes_per_s < 3
    assert cluster.num_gpus == 1
    assert set(cluster.unverified) == {"inter_gb_per_s", "intra_gb_per_s", "host_link_gb_per_s"}


def test_processes_gather_and_a_step_can_be_simulated_on_what_was_found() -> None:
    cluster, assumptions, _, _ = measured(2)
    assert cluster.num_gpus == 2
    assert "intra_gb_per_s" not in cluster.unverified
    assert 1e7 < cluster.intra_bytes_per_s < 1e12
    # What was measured is taken as reached: a second's product and a second's gather take a second each.
    events = (
        Kernel("mm", COMPUTE, cluster.peak_flops_per_s, 0, "bfloat16"),
        Collective("all_gather", "ep", (0, 1), int(cluster.intra_bytes_per_s), "ep", "none", "bfloat16"),
    )
    step = simulate(Trace(0, 2, 1, (), events), cluster, assumptions=assumptions)
    assert step.lanes[COMPUTE].busy_s == pytest.approx(1, rel=0.1)
    assert step.lanes["ep"].busy_s == pytest.approx(1, rel=0.1)


def test_no_process_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 processes cannot be measured; give 1 or more"):
        Stopwatch(0)
