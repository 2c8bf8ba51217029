"""The published optimizer step of the reference run, before and after experts were kept whole, by our estimate.

Published (PyTorch blog, 2026-11-12): 41.7 s before, 2.2 s after, on replicas of 384 GH200; neither the parallel layout
nor what was communicated is. So each figure is estimated under one stated *reading*, and `readings` lists others, right
and wrong alike. With the same speeds as our own step:

    after   every rank orthogonalizes its own whole experts, and gathers and orthogonalizes all dense matrices
    before  as after, but every rank gathers all experts of its expert-parallel rank, and orthogonalizes them all
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from amalthea.core.units import format_si
from amalthea.model.config import ModelConfig
from amalthea.optim.assign import assign
from amalthea.optim.config import OptimConfig
from amalthea.optim.flops import orthogonalize_flops
from amalthea.plan.clusters import get_cluster
from amalthea.plan.optimizer_ledger import BF16_BYTES, FP32_BYTES
from amalthea.plan.optimizer_time import Part, Speeds, muon_bytes_per_element
from amalthea.plan.shapes import parameter_shapes

REPLICA_RANKS = 384
"""GPUs of a replica of the reference run; all replicas did the same work."""
_SHAPE = {"num_layers": 74, "hidden_size": 6144}
_MOE_SHAPE = {"num_experts": 384, "top_k": 8, "expert_hidden_size": 1792}


@dataclass(frozen=True)
class Reading:
    """What a run may have done, where nothing is published."""

    ep: int = 4
    """Ranks that share one copy of the experts: the GPUs of a node."""
    gather_dtype: str = "bf16"
    overlapped: bool = False
    """Whether gathers run beside Newton-Schulz, perfectly."""
    node_shares: bool = True
    """Whether what is gathered enters a node once, over all its NICs, as NCCL's rings do; or once for each GPU."""

    def __str__(self) -> str:
        order = "beside" if self.overlapped else "before"
        return f"ep {self.ep}, gathered in {self.gather_dtype} {order} orthogonalizing"


@dataclass(frozen=True)
class Published:
    """One published figure and our estimate of it."""

    name: str
    published_s: float
    reading: Reading
    parts: tuple[Part, ...]
    assumptions: tuple[str, ...]
    readings: tuple[tuple[Reading, float], ...]
    """Seconds under other readings too."""

    @property
    def estimated_s(self) -> float:
        return _seconds(self.parts, self.reading)

    @property
    def ratio(self) -> float:
        return self.estimated_s / self.published_s

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "published_s": self.published_s,
            "estimated_s": self.estimated_s,
            "ratio": self.ratio,
            "parts": [asdict(part) for part in self.parts],
            "assumptions": list(self.assumptions),
            "readings": [
                {**asdict(reading), "estimated_s": seconds, "ratio": seconds / self.published_s}
                for reading, seconds in self.readings
            ],
        }


def is_reference(model: ModelConfig) -> bool:
    """Whether a model has what is published of the reference model's shape."""
    return all(getattr(model, key) == value for key, value in _SHAPE.items()) and all(
        getattr(model.moe, key) == value for key, value in _MOE_SHAPE.items()
    )


def published_estimates(model: ModelConfig) -> tuple[Published, ...]:
    """Before and after, on `jupiter`; none where the model is not the reference model."""
    if not is_reference(model):
        return ()
    speeds, work = Speeds(get_cluster("jupiter")), _Work.of(model)
    shared = (
        *speeds.assumptions()[:3],
        "replicas of 384 GPUs that all do the same work (published); gradients were reduced in backward",
        "a gather reaches each node once, over all its NICs, and spreads inside it, as NCCL's rings do",
        "element-wise kernels as in our own step; latency and kernel launches not counted",
    )
    inferred = "not published, inferred: expert-parallel degree 4, gathers in bf16 that are finished before"
    return (
        _published(
            "before: local experts gathered, everything repeated",
            41.7,
            partial(_before, work, speeds),
            [replace(reading, ep=ep) for ep in (1, 2, 4, 8) for reading in _readings(True)],
            (
                *shared,
                f"{inferred} orthogonalizing starts; each rank gathers the 96 experts of its expert-parallel rank "
                "in every layer, over its own NIC, and orthogonalizes all of them, as 95 other ranks do",
            ),
        ),
        _published(
            "after: experts whole, dense matrices repeated on every rank",
            2.2,
            partial(_after, work, speeds),
            _readings(True, False),
            (
                *shared,
                f"{inferred} orthogonalizing starts; each rank gathers and orthogonalizes every dense matrix",
            ),
        ),
    )


@dataclass(frozen=True)
class _Work:
    """Totals of one replica."""

    expert_flops: int
    expert_elements: int
    dense_flops: int
    dense_elements: int

    @classmethod
    def of(cls, model: ModelConfig) -> _Work:
        totals = {"routed expert": [0, 0], "hidden matrix": [0, 0]}
        for name, shape in parameter_shapes(model):
            of = assign(name, shape, OptimConfig())
            if of.optimizer == "muon":
                matrices = shape[0] if len(shape) == 3 else 1
                totals[of.reason][0] += matrices * orthogonalize_flops(*shape[-2:])
                totals[of.reason][1] += math.prod(shape)
        return cls(*totals["routed expert"], *totals["hidden matrix"])


def _readings(*node_shares: bool) -> list[Reading]:
    dtypes, orders = ("bf16", "fp32"), (False, True)
    return [Reading(4, dtype, beside, shares) for shares in node_shares for dtype in dtypes for beside in orders]


def _published(
    name: str,
    published_s: float,
    parts_of: Callable[[Reading], tuple[Part, ...]],
    readings: list[Reading],
    assumptions: tuple[str, ...],
) -> Published:
    return Published(
        name=name,
        published_s=published_s,
        reading=Reading(),
        parts=parts_of(Reading()),
        assumptions=assumptions,
        readings=tuple((reading, _seconds(parts_of(reading), reading)) for reading in readings),
    )


def _after(work: _Work, speeds: Speeds, reading: Reading) -> tuple[Part, ...]:
    own = work.expert_flops / REPLICA_RANKS
    return (
        Part(
            "experts_newton_schulz",
            own / speeds.flops_per_s,
            f"{format_si(own, 'FLOP')}: 1 in {REPLICA_RANKS} experts",
        ),
        *_dense(work, speeds, reading),
        _element_wise(work, speeds),
    )


def _before(work: _Work, speeds: Speeds, reading: Reading) -> tuple[Part, ...]:
    flops, elements = work.expert_flops / reading.ep, work.expert_elements / reading.ep
    # Ranks of a node that gather the same experts share what their NICs bring in.
    together = max(1, speeds.cluster.gpus_per_node // reading.ep)
    return (
        Part(
            "experts_newton_schulz",
            flops / speeds.flops_per_s,
            f"{format_si(flops, 'FLOP')}: 1 in {reading.ep} experts",
        ),
        _gather("experts_gather", elements, speeds, reading, ranks=REPLICA_RANKS // reading.ep, together=together),
        *_dense(work, speeds, reading),
        _element_wise(work, speeds),
    )


def _dense(work: _Work, speeds: Speeds, reading: Reading) -> tuple[Part, Part]:
    together = speeds.cluster.gpus_per_node
    return (
        Part(
            "dense_newton_schulz", work.dense_flops / speeds.flops_per_s, f"{format_si(work.dense_flops, 'FLOP')}: all"
        ),
        _gather("dense_gather", work.dense_elements, speeds, reading, ranks=REPLICA_RANKS, together=together),
    )


def _gather(name: str, elements: float, speeds: Speeds, reading: Reading, *, ranks: int, together: int) -> Part:
    """An all-gather over `ranks` ranks, `together` of them in each node."""
    num_bytes = elements * (BF16_BYTES if reading.gather_dtype == "bf16" else FP32_BYTES)
    together = together if reading.node_shares else 1
    rate = together * speeds.cluster.inter_bytes_per_s * speeds.efficiency.network
    seconds = num_bytes * (1 - together / ranks) / rate
    return Part(name, seconds, f"{format_si(num_bytes, 'B')} through {together} NIC{'s' * (together > 1)}")


def _element_wise(work: _Work, speeds: Speeds) -> Part:
    per_element = sum(muon_bytes_per_element(OptimConfig().muon))
    moved = (work.expert_elements + work.dense_elements) / REPLICA_RANKS * per_element
    return Part("element_wise", moved / speeds.hbm_bytes_per_s, f"{format_si(moved, 'B')} of HBM traffic")


def _seconds(parts: tuple[Part, ...], reading: Reading) -> float:
    gathers = sum(part.seconds for part in parts if part.name.endswith("_gather"))
    rest = sum(part.seconds for part in parts) - gathers
    return max(gathers, rest) if reading.overlapped else gathers + rest
