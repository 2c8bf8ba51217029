"""The machines that plans are made for, as frozen figures: per GPU, one direction, powers of a thousand.

A figure named in `unverified` was inferred or read in one secondary place; estimates that lean on it say so. Links
are line rates: what is achieved of them is for the estimate to assume (`plan/optimizer_time.py`).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from amalthea.core.errors import ConfigError


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs. `peak_tflops` is dense bf16; bandwidths are those of one GPU in one direction."""

    name: str
    gpu: str
    num_nodes: int | None
    """None for a generic kind of node, of which there may be any number."""
    gpus_per_node: int
    peak_tflops: float
    hbm_gb: float
    hbm_tb_per_s: float
    intra_gb_per_s: float
    """Out of one GPU to all others of its node together."""
    inter_gb_per_s: float
    """Network line rate to other nodes."""
    host_gb: float
    """Host memory per GPU."""
    network: str
    scheduler: str
    source: str
    intra_pair_gb_per_s: float | None = None
    """To one other GPU of the node, where links go from pair to pair."""
    hbm_visible_gib: float | None = None
    """What of the HBM a process sees, where that is known."""
    host_link_gb_per_s: float | None = None
    """Between GPU and host memory."""
    nodes_per_group: int | None = None
    """Nodes inside which the network does not block, where that is known."""
    time_limit_h: float | None = None
    """Of one job in the usual queue."""
    gpu_watts: float | None = None
    """Cap or design power of one GPU; of a superchip, with its processor."""
    unverified: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int | None:
        return None if self.num_nodes is None else self.num_nodes * self.gpus_per_node

    @property
    def is_hopper(self) -> bool:
        """Whether FlashAttention-3 runs there, by the GPU's name."""
        return re.search(r"H(100|200|800|20)\b", self.gpu) is not None

    def check_holds(self, num_gpus: int) -> None:
        """Raises ConfigError where the cluster has fewer GPUs."""
        if self.num_gpus is not None and num_gpus > self.num_gpus:
            raise ConfigError(
                f"{self.name} has {self.num_gpus:,} GPUs, fewer than {num_gpus:,}; take fewer with --gpus"
            )

    @property
    def peak_flops_per_s(self) -> float:
        return self.peak_tflops * 1e12

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.hbm_tb_per_s * 1e12

    @property
    def intra_bytes_per_s(self) -> float:
        return self.intra_gb_per_s * 1e9

    @property
    def inter_bytes_per_s(self) -> float:
        return self.inter_gb_per_s * 1e9


_GENERIC = "generic node; NVIDIA data sheets"

CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        Cluster(
            name="jupiter",
            gpu="GH200",
            num_nodes=5884,
            gpus_per_node=4,
            peak_tflops=989,
            hbm_gb=96,
            hbm_visible_gib=95.6,
            hbm_tb_per_s=4.0,
            intra_pair_gb_per_s=150,
            intra_gb_per_s=450,
            inter_gb_per_s=25,
            host_gb=120,
            host_link_gb_per_s=450,
            nodes_per_group=240,
            time_limit_h=12,
            gpu_watts=680,
            network="InfiniBand NDR200, Dragonfly+, groups of 240 nodes",
            scheduler="Slurm (srun only), 12 h in the normal queue",
            source="apps.fz-juelich.de/jsc/hps/jupiter/configuration.html",
            notes=("superchips are capped at 680 W", "inside a group of 240 nodes the network does not block"),
        ),
        Cluster(
            name="alps",
            gpu="GH200",
            num_nodes=2688,
            gpus_per_node=4,
            peak_tflops=989,
            hbm_gb=96,
            hbm_tb_per_s=4.0,
            intra_pair_gb_per_s=150,
            intra_gb_per_s=450,
            inter_gb_per_s=25,
            host_gb=120,
            time_limit_h=12,
            network="Slingshot 11, dragonfly",
            scheduler="Slurm, 12 to 24 h",
            source="docs.cscs.ch/alps/hardware",
            unverified=("hbm_tb_per_s", "intra_pair_gb_per_s", "intra_gb_per_s", "network"),
        ),
        Cluster(
            name="isambard-ai",
            gpu="GH200",
            num_nodes=1362,
            gpus_per_node=4,
            peak_tflops=989,
            hbm_gb=96,
            hbm_tb_per_s=4.0,
            intra_pair_gb_per_s=150,
            intra_gb_per_s=450,
            inter_gb_per_s=25,
            host_gb=120,
            time_limit_h=24,
            network="Slingshot 11",
            scheduler="Slurm, 24 h",
            source="Isambard-AI, Cray User Group 2024; docs.isambard.ac.uk",
            unverified=("hbm_tb_per_s", "intra_pair_gb_per_s", "intra_gb_per_s"),
        ),
        Cluster(
            name="marenostrum5-acc",
            gpu="H100",
            num_nodes=1120,
            gpus_per_node=4,
            peak_tflops=989,
            hbm_gb=64,
            hbm_tb_per_s=2.0,
            intra_gb_per_s=450,
            inter_gb_per_s=25,
            host_gb=128,
            time_limit_h=72,
            network="InfiniBand NDR200",
            scheduler="Slurm, 72 h",
            source="Barcelona Supercomputing Center, MareNostrum 5 accelerated partition",
            unverified=("hbm_tb_per_s", "intra_gb_per_s", "inter_gb_per_s"),
        ),
        Cluster(
            name="leonardo",
            gpu="A100",
            num_nodes=3456,
            gpus_per_node=4,
            peak_tflops=312,
            hbm_gb=64,
            hbm_tb_per_s=1.6,
            intra_pair_gb_per_s=100,
            intra_gb_per_s=300,
            inter_gb_per_s=12.5,
            host_gb=128,
            time_limit_h=24,
            network="InfiniBand HDR100, Dragonfly+",
            scheduler="Slurm, 24 h",
            source="leonardo-supercomputer.cineca.eu/hpc-system",
            unverified=("peak_tflops", "hbm_tb_per_s"),
        ),
        Cluster(
            name="lumi-g",
            gpu="half an MI250X (GCD)",
            num_nodes=2978,
            gpus_per_node=8,
            peak_tflops=191.5,
            hbm_gb=64,
            hbm_tb_per_s=1.6,
            intra_pair_gb_per_s=50,
            intra_gb_per_s=200,
            inter_gb_per_s=12.5,
            host_gb=64,
            time_limit_h=48,
            gpu_watts=280,
            network="Slingshot 11, dragonfly",
            scheduler="Slurm, 48 h, at most 1,024 nodes",
            source="www.lumi-supercomputer.eu/lumis-full-system-architecture-revealed",
            unverified=("peak_tflops",),
            notes=("links between GCDs differ: 50 to 200 GB/s",),
        ),
        Cluster(
            name="h100-sxm",
            gpu="H100 SXM",
            num_nodes=None,
            gpus_per_node=8,
            peak_tflops=989,
            hbm_gb=80,
            hbm_tb_per_s=3.35,
            intra_gb_per_s=450,
            inter_gb_per_s=50,
            host_gb=256,
            gpu_watts=700,
            network="400 Gb/s for each GPU",
            scheduler="any",
            source=_GENERIC,
        ),
        Cluster(
            name="h200-sxm",
            gpu="H200 SXM",
            num_nodes=None,
            gpus_per_node=8,
            peak_tflops=989,
            hbm_gb=141,
            hbm_tb_per_s=4.8,
            intra_gb_per_s=450,
            inter_gb_per_s=50,
            host_gb=256,
            gpu_watts=700,
            network="400 Gb/s for each GPU",
            scheduler="any",
            source=_GENERIC,
        ),
        Cluster(
            name="b200",
            gpu="B200",
            num_nodes=None,
            gpus_per_node=8,
            peak_tflops=2250,
            hbm_gb=180,
            hbm_tb_per_s=8.0,
            intra_gb_per_s=900,
            inter_gb_per_s=50,
            host_gb=225,
            gpu_watts=1000,
            network="400 Gb/s for each GPU",
            scheduler="any",
            source=_GENERIC,
            unverified=("peak_tflops", "hbm_tb_per_s"),
        ),
    )
}


def get_cluster(name: str) -> Cluster:
    """The preset of that name. Raises ConfigError, with what was probably meant."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    close = difflib.get_close_matches(name.lower().replace("_", "-"), CLUSTERS, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]}?" if close else ";"
    raise ConfigError(f"unknown cluster {name!r}{meant} clusters are {', '.join(CLUSTERS)}, and this")
