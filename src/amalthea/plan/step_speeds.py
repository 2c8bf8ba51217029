"""What one GPU of a cluster is taken to achieve in a whole step, and how long a kernel takes.

Each assumption stands beside its source; where no source is named it is ours, unmeasured, and `sensitivity` in
`plan/timeline.py` says what it matters. The optimizer's estimate (`plan/optimizer_time.py`) shares its fractions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

import numpy as np

from amalthea.plan.clusters import Cluster
from amalthea.plan.events import Kernel, Phase
from amalthea.plan.optimizer_time import Efficiency

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

KERNEL_CLASSES = ("memory", "matmul", "grouped", "attention", "newton_schulz")
"""`memory` is whatever multiplies no matrices; the number of a class is its place here."""
DTYPES = ("bf16", "fp8", "fp32")
"""By speed of matrix products; whatever is no 8 or 16 bit float counts as fp32."""

_GROUPED = re.compile(r"grouped")
_ATTENTION = re.compile(r"attention|attn|sdpa|flash")


FLASH_3 = 0.5
"""`attention` with FlashAttention-3."""


def _assume(value: float, why: str) -> float:
    return field(default=value, metadata={"why": why})


@dataclass(frozen=True)
class Assumptions:
    """Fractions of a peak, seconds (`_s`), and FLOP at which half of a speed is reached."""

    matmul: float = _assume(0.8, "of peak, large bf16 products: one H200 reaches 770 to 800 of 989 TFLOP/s at 8192³")
    matmul_half_flops: float = _assume(5e9, "a product of so many FLOP reaches half of that speed")
    grouped: float = _assume(0.6, "of peak, grouped products of experts, where groups are large")
    attention: float = _assume(
        0.35,
        "of peak: 0.35 with FlashAttention-2, 0.5 with -3; an H100 at 8k reaches 333 and 602 of 989 TFLOP/s "
        "forward, 318 and 559 backward (arXiv 2407.08608, figures 5 and 6)",
    )
    newton_schulz: float = _assume(Efficiency.matmul, "of peak, batched products of the optimizer")
    fp32_peak: float = _assume(0.068, "of the bf16 peak: 67 of 989 TFLOP/s of an H100, no TF32")
    hbm: float = _assume(Efficiency.hbm, "of HBM bandwidth: one H200 copies at 4.3 of 4.8 TB/s")
    network: float = _assume(Efficiency.network, "of the network's line rate: NVIDIA/nccl-tests issue 290")
    across_groups: float = _assume(1.0, "of that between groups of nodes: their links are taken not to be contended")
    intra_node: float = _assume(Efficiency.intra_node, "of links inside a node: NVIDIA/nccl-tests issue 212")
    host_link: float = _assume(0.85, "of the link to host memory")
    unknown_host_link_gb_per_s: float = _assume(50.0, "that link, each way, where the cluster names none: PCIe 5 x16")
    launch_s: float = _assume(8e-6, "of the processor for each kernel, collective or copy, eager mode")
    kernel_floor_s: float = _assume(2e-6, "the shortest kernel, with the gap before the next")
    collective_base_s: float = _assume(14e-6, "before a collective moves anything: NCCL's tuning table, ring")
    node_hop_s: float = _assume(1.9e-6, "a step of a ring inside a node: NCCL's tuning table, LL128")
    network_hop_s: float = _assume(4e-6, "a step of a ring between nodes: NCCL's tuning table, LL128")
    peer_s: float = _assume(1e-6, "for each peer of an all-to-all")

    def lines(self) -> tuple[str, ...]:
        """In words, with the source of each."""
        return tuple(f"{f.name} = {getattr(self, f.name):g} ({f.metadata['why']})" for f in fields(self))


@dataclass(frozen=True)
class KernelTable:
    """Kernels as columns; `classes` and `dtypes` number KERNEL_CLASSES and DTYPES."""

    flops: Floats
    num_bytes: Floats
    classes: Ints
    dtypes: Ints


@dataclass(frozen=True)
class StepSpeeds:
    """A cluster and what is reached of it. Rates are of one GPU, in one direction."""

    cluster: Cluster
    assumptions: Assumptions = Assumptions()

    def kernel_seconds(self, kernels: KernelTable) -> Floats:
        """The longer of computing and moving bytes, and never less than the floor."""
        a = self.assumptions
        reached = np.array([1.0, a.matmul, a.grouped, a.attention, a.newton_schulz])[kernels.classes]
        peak = self.cluster.peak_flops_per_s * np.array([1.0, 2.0, a.fp32_peak])[kernels.dtypes]
        ramp = np.where(kernels.classes == KERNEL_CLASSES.index("matmul"), a.matmul_half_flops, 0.0)
        # Time is linear in FLOP with an offset, so the speed is half its largest where the FLOP equal the ramp's.
        computing = np.where(kernels.flops > 0, (kernels.flops + ramp) / (reached * peak), 0.0)
        moving = kernels.num_bytes / (self.cluster.hbm_bytes_per_s * a.hbm)
        return np.maximum(np.maximum(computing, moving), a.kernel_floor_s)

    def network_bytes_per_s(self, *, across_groups: bool) -> float:
        rate = self.cluster.inter_bytes_per_s * self.assumptions.network
        return rate * self.assumptions.across_groups if across_groups else rate

    def node_bytes_per_s(self, *, num_ranks: int) -> float:
        """Out of one GPU to `num_ranks` − 1 others of its node: where links go from pair to pair, only theirs."""
        rate, pair = self.cluster.intra_bytes_per_s, self.cluster.intra_pair_gb_per_s
        if pair is not None:
            rate = min(rate, pair * 1e9 * (num_ranks - 1))
        return rate * self.assumptions.intra_node

    @property
    def host_link_bytes_per_s(self) -> float:
        a, known = self.assumptions, self.cluster.host_link_gb_per_s
        return (a.unknown_host_link_gb_per_s if known is None else known) * 1e9 * a.host_link


def kernel_class(kernel: Kernel, phase: Phase | None) -> int:
    """Number of a kernel's class, from its name and where it runs."""
    if kernel.flops <= 0:
        name = "memory"
    elif _ATTENTION.search(kernel.name):
        name = "attention"
    elif _GROUPED.search(kernel.name):
        name = "grouped"
    else:
        name = "newton_schulz" if phase is not None and phase.name == "optimizer" else "matmul"
    return KERNEL_CLASSES.index(name)


def dtype_number(dtype: str) -> int:
    """`bfloat16` → 0. Takes torch's names and the short ones."""
    if dtype.startswith("float8") or dtype == "fp8":
        return DTYPES.index("fp8")
    return DTYPES.index("bf16" if dtype in ("bfloat16", "float16", "bf16", "fp16") else "fp32")
