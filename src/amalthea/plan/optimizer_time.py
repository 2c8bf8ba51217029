"""Seconds of an optimizer step on a described cluster: an *estimate*, from counts and stated efficiencies.

A step, on the rank that ends last: routed directions leave for their owners while local units are orthogonalized;
routed units are orthogonalized as soon as both are done; updates travel back; with owning replicas, gradients were
reduced to owners before and updates spread to all replicas after. Weights and momenta move by element-wise kernels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from amalthea.config.run import RunConfig
from amalthea.core.units import format_si
from amalthea.optim.config import MuonConfig
from amalthea.plan.clusters import Cluster
from amalthea.plan.optimizer_ledger import BF16_BYTES, FP32_BYTES
from amalthea.plan.optimizer_step import OptimizerPlan

_ADAMW_BYTES = 28
"""Per element: weight, gradient and two moments read, weight and moments written, in fp32."""
_APPLY_BYTES = 18
"""Per stored element: decay reads and writes the weight, adding reads it and the bf16 update and writes it."""
_PACK_STORED_BYTES, _PACK_OWNED_BYTES = 12, 14
"""For replicas. Per stored element: buffer zeroed, gradient read and written. Per owned one: its sum copied back in
fp32, its update's buffer zeroed and filled in bf16."""


@dataclass(frozen=True)
class Efficiency:
    """What is reached of a peak, as a fraction."""

    matmul: float = 0.71
    hbm: float = 0.9
    network: float = 0.9
    intra_node: float = 0.8


@dataclass(frozen=True)
class Speeds:
    """What one GPU of a cluster is taken to achieve."""

    cluster: Cluster
    efficiency: Efficiency = Efficiency()

    @property
    def flops_per_s(self) -> float:
        return self.cluster.peak_flops_per_s * self.efficiency.matmul

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.cluster.hbm_bytes_per_s * self.efficiency.hbm

    def link_bytes_per_s(self, *, num_ranks: int) -> float:
        """Out of one GPU, to a group of `num_ranks` neighbours: over the network unless one node holds them all."""
        if num_ranks <= self.cluster.gpus_per_node:
            return self.cluster.intra_bytes_per_s * self.efficiency.intra_node
        return self.cluster.inter_bytes_per_s * self.efficiency.network

    def assumptions(self) -> tuple[str, ...]:
        """In words, with the source of each fraction."""
        cluster, reached = self.cluster, self.efficiency
        lines = [
            f"bf16 matrix products at {self.flops_per_s / 1e12:.0f} TFLOP/s, {reached.matmul:.0%} of "
            f"{cluster.peak_tflops:g} (one H200 reaches 770 to 800 of 989 on products of 8192³)",
            f"HBM at {self.hbm_bytes_per_s / 1e12:.2f} TB/s, {reached.hbm:.0%} of {cluster.hbm_tb_per_s:g} "
            "(one H200 copies at 4.3 of 4.8)",
            f"network at {cluster.inter_gb_per_s * reached.network:g} GB/s per GPU and direction, "
            f"{reached.network:.0%} of {cluster.inter_gb_per_s:g} (NCCL reaches 46 to 48 of 50 per NIC: "
            "NVIDIA/nccl-tests issue 290), without congestion, at any distance",
            f"links inside a node at {cluster.intra_gb_per_s * reached.intra_node:g} GB/s per GPU and direction, "
            f"{reached.intra_node:.0%} of {cluster.intra_gb_per_s:g} (NCCL reaches 370 of 450: nccl-tests issue 212)",
        ]
        if cluster.unverified:
            lines.append(f"not verified of {cluster.name}: {', '.join(cluster.unverified)}")
        return tuple(lines)


@dataclass(frozen=True)
class Part:
    """Seconds of one thing, and how they come about."""

    name: str
    seconds: float
    basis: str


@dataclass(frozen=True)
class StepEstimate:
    """The parts of a step on the rank that ends last; `hidden_s` of them run beside others."""

    cluster: Cluster
    flops_per_s: float
    """Of bf16 matrix products, as assumed."""
    parts: tuple[Part, ...]
    hidden_s: float
    backward_all_reduce_s: float
    """Outside the step: all-reduce of gradients over replicas where these repeat the work; 0 where they own."""
    assumptions: tuple[str, ...]

    @property
    def step_s(self) -> float:
        return sum(part.seconds for part in self.parts) - self.hidden_s

    @property
    def without_replicas_s(self) -> float:
        """The step less its exchange between replicas: what compares with a step that leaves this to backward."""
        return self.step_s - sum(part.seconds for part in self.parts if part.name.startswith("replica_"))

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster.name,
            "figures_are": "estimate",
            "step_s": self.step_s,
            "step_parts": [asdict(part) for part in self.parts],
            "hidden_s": self.hidden_s,
            "without_replicas_s": self.without_replicas_s,
            "backward_all_reduce_s": self.backward_all_reduce_s,
            "assumptions": list(self.assumptions),
        }


def estimate_step(plan: OptimizerPlan, config: RunConfig, cluster: Cluster) -> StepEstimate:
    """Estimates the step of `plan`, which must be `config`'s. Raises ConfigError where the cluster is too small."""
    cluster.check_holds(plan.num_gpus)
    speeds, ledger = Speeds(cluster), plan.ledger
    within = speeds.link_bytes_per_s(num_ranks=plan.grid.num_ranks)
    across = speeds.link_bytes_per_s(num_ranks=plan.num_gpus)
    out, arriving = ledger.expert_out + ledger.dense_out, ledger.expert_in + ledger.dense_in
    travel_bytes = BF16_BYTES * int(np.maximum(out, arriving).max(initial=0))
    travel_s = travel_bytes / within

    local_s = ledger.local_flops / speeds.flops_per_s
    routed_s = ledger.flops / speeds.flops_per_s - local_s
    last = np.unravel_index((np.maximum(local_s, travel_s) + routed_s).argmax(), local_s.shape)
    touched = _element_wise_bytes(plan, config.optim.muon)
    reduced, spread = _replica_bytes(plan)
    travels = f"{format_si(travel_bytes, 'B')} through the busiest rank, bf16"
    parts = (
        Part(
            "experts_newton_schulz",
            float(ledger.expert_flops[last] / speeds.flops_per_s),
            f"{format_si(ledger.expert_flops[last], 'FLOP')} of the rank that ends last",
        ),
        Part(
            "dense_newton_schulz",
            float(ledger.dense_flops[last] / speeds.flops_per_s),
            f"{format_si(ledger.dense_flops[last], 'FLOP')} of the rank that ends last",
        ),
        Part("element_wise", touched / speeds.hbm_bytes_per_s, f"{format_si(touched, 'B')} of HBM traffic"),
        Part("all_to_all_to_owners", travel_s, travels),
        Part("all_to_all_back", travel_s, travels),
        Part("replica_reduce", reduced / across, f"{format_si(reduced, 'B')} from a rank, gradients in fp32"),
        Part("replica_spread", spread / across, f"{format_si(spread, 'B')} from a rank, updates in bf16"),
    )
    backward_s = 0.0
    if plan.grid.num_replicas > 1 and not plan.owning:
        backward_s = _all_reduce_bytes(plan, config) / across
    return StepEstimate(
        cluster=cluster,
        flops_per_s=speeds.flops_per_s,
        parts=parts,
        hidden_s=min(travel_s, float(local_s[last])),
        backward_all_reduce_s=backward_s,
        assumptions=(*speeds.assumptions(), *_step_assumptions(plan, config.optim.muon)),
    )


def muon_bytes_per_element(muon: MuonConfig) -> tuple[int, int]:
    """HBM bytes that a step moves for each owned and for each stored element, outside Newton-Schulz.

    Counted kernel by kernel: momentum lerp (read two, write one), Nesterov's lerp, cast to bf16; decay and addition.
    A bf16 momentum is widened and narrowed around its lerp.
    """
    owned = 3 * FP32_BYTES + FP32_BYTES + BF16_BYTES
    owned += 3 * FP32_BYTES if muon.nesterov else 0
    owned += 2 * (FP32_BYTES + BF16_BYTES) if muon.momentum_dtype == "bf16" else 0
    return owned, _APPLY_BYTES


def _element_wise_bytes(plan: OptimizerPlan, muon: MuonConfig) -> int:
    """HBM bytes of the rank that moves most."""
    owned, stored = muon_bytes_per_element(muon)
    if plan.owning:
        owned, stored = owned + _PACK_OWNED_BYTES, stored + _PACK_STORED_BYTES
    moved = plan.ledger.momentum * owned + plan.ledger.stored * stored
    return int(moved.max(initial=0)) + plan.adamw_elements * _ADAMW_BYTES


def _replica_bytes(plan: OptimizerPlan) -> tuple[float, float]:
    """Bytes from a rank: gradients to owners, with AdamW's all-reduce; updates to all."""
    muon = float(plan.ledger.replica_bytes.max(initial=0))
    of_reduce = FP32_BYTES / (FP32_BYTES + BF16_BYTES)
    return muon * of_reduce + float(plan.bytes_sent["replicas_adamw"].max(initial=0)), muon * (1 - of_reduce)


def _all_reduce_bytes(plan: OptimizerPlan, config: RunConfig) -> float:
    """Of all gradients of a rank over its replicas, by a ring."""
    width = FP32_BYTES if config.parallel.reduce_dtype == "fp32" else BF16_BYTES
    elements = int(plan.ledger.stored.max(initial=0)) + plan.adamw_elements
    return 2 * (1 - 1 / plan.grid.num_replicas) * elements * width


def _step_assumptions(plan: OptimizerPlan, muon: MuonConfig) -> list[str]:
    lines = [
        "latency, kernel launches, stragglers and the gradient norm are not counted",
        "the way to owners runs beside the Newton-Schulz of local units; the way back waits for the last owner",
    ]
    if plan.owning:
        lines.append(
            "nothing hides the exchange between replicas, which stands for the all-reduce that backward would do"
        )
    elif plan.grid.num_replicas > 1:
        lines.append("replicas repeat the work; the all-reduce of their gradients belongs to backward")
    if muon.form == "gram":
        lines.append("FLOP are those of the standard form; the Gram form has fewer on wide matrices")
    return lines
