"""The optimizer step of a run of any size, planned from its configuration: units, owners, loads, bytes.

The planner is the one that the run uses (`flexshard/plan.py`), on the parameters that the model will have: nothing is
built and no process group exists. What the step costs in seconds is for `plan/optimizer_time.py` to estimate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.flexshard.buckets import BUCKET_ELEMENTS, buckets
from amalthea.flexshard.layout import Grid, Layout
from amalthea.flexshard.plan import plan_layout
from amalthea.optim.assign import Assignment, assign_all, by_kind, stored_parameter
from amalthea.optim.flops import orthogonalize_flops
from amalthea.parallel.cut import experts_are_cut
from amalthea.plan.optimizer_ledger import BF16_BYTES, FP32_BYTES, Ledger, count
from amalthea.plan.shapes import parameter_shapes

ExpertStorage = Literal["whole", "rows", "adamw", "none"]

_PACKED_COPIES, _ASSEMBLED_COPIES = 2, 3
"""Of a rank's pieces: on their way out, and as updates. Of routed units: whole, as updates, and packed to go back."""
_NEWTON_SCHULZ_COPIES = 4
"""Matrices of a batch that live at once while it is orthogonalized."""


@dataclass(frozen=True)
class Group:
    """Parameters alike but for their layer: `blocks.*.attn.wq.weight`."""

    pattern: str
    shape: tuple[int, ...]
    optimizer: str
    reason: str
    tensors: int
    params: int
    units: int
    """Matrices that Muon orthogonalizes; 0 where AdamW takes them."""


@dataclass(frozen=True)
class OptimizerPlan:
    """Who does what in a step of `grid`'s ranks; `ledger` has the figures of every rank.

    `owning`: each unit has one owning replica. Otherwise `layout` is that of one replica, which all repeat.
    """

    grid: Grid
    owning: bool
    experts: ExpertStorage
    num_experts: int
    groups: tuple[Group, ...]
    layout: Layout
    ledger: Ledger
    adamw_elements: int
    """Elements of AdamW's parameters on the rank that stores most of them."""
    adamw_buckets: int
    momentum_bytes_per_element: int

    @property
    def num_gpus(self) -> int:
        return self.grid.num_replicas * self.grid.num_ranks

    @property
    def units_by_kind(self) -> dict[str, int]:
        head = Counter(self.layout.parameters[unit.parameter].head_rows is not None for unit in self.layout.units)
        experts = int(self.ledger.is_expert.sum())
        return {"expert": experts, "matrix": head[False] - experts, "head": head[True]}

    @property
    def bytes_sent(self) -> dict[str, np.ndarray]:
        """Bytes that leave each rank in a step [N, K], by what they are for."""
        ledger = self.ledger
        whole = np.zeros_like(ledger.momentum)
        reduced = 2 * (self.grid.num_replicas - 1) * self.adamw_elements * FP32_BYTES // self.grid.num_replicas
        return {
            "all_to_all_experts": BF16_BYTES * (ledger.expert_out + ledger.expert_in),
            "all_to_all_dense": BF16_BYTES * (ledger.dense_out + ledger.dense_in),
            "replicas_muon": whole + ledger.replica_bytes,
            "replicas_adamw": whole + (reduced if self.owning else 0),
        }

    @property
    def collectives(self) -> dict[str, int]:
        """Collectives of a step on the rank that takes part in most; the gradient norm's is not among them."""
        routed = not bool(self.ledger.is_local.all())
        rounds = int(self.ledger.num_buckets.max(initial=0))
        return {
            "all_to_all": 2 * routed,
            "reduce_scatter": rounds,
            "all_gather": rounds,
            "all_reduce": self.adamw_buckets if self.owning else 0,
        }

    @cached_property
    def scratch(self) -> dict[str, np.ndarray]:
        """Bytes that a step needs for a while on each rank [N, K], by what they are for."""
        ledger = self.ledger
        return {
            "packed_pieces": _PACKED_COPIES * BF16_BYTES * ledger.packed,
            "assembled_matrices": _ASSEMBLED_COPIES * BF16_BYTES * ledger.assembled,
            "newton_schulz": _NEWTON_SCHULZ_COPIES * BF16_BYTES * ledger.batch,
            "updates_for_replicas": BF16_BYTES * ledger.momentum * self.owning,
        }

    @property
    def busiest(self) -> tuple[int, int]:
        """Replica and rank with most Newton-Schulz FLOP."""
        replica, rank = divmod(int(self.ledger.flops.argmax()), self.layout.grid.num_ranks)
        return replica, rank

    @property
    def storage(self) -> str:
        """How routed experts are stored and reached, in a sentence."""
        ranks, experts, grid = "ranks" if self.grid.num_ranks > 1 else "rank", self.num_experts, self.grid
        what = f"{grid.num_ranks} {ranks} of a replica, {experts} experts"
        if self.experts == "none":
            return "no layer has routed experts"
        if self.experts == "adamw":
            return f"{what}: AdamW takes the experts, element by element; no matrix need be whole"
        if self.experts == "rows":
            return f"{what}: more ranks than experts, so experts are cut by rows: routed path, they travel to owners"
        if grid.num_ranks > experts:
            idle = grid.num_ranks - experts
            return f"{what}: experts stay whole, as their rows do not divide evenly; {idle} ranks hold none"
        inside = "for them inside a replica" if self.owning else "for them"
        return f"{what}: each lies whole where it is orthogonalized; the step sends nothing {inside}"

    def to_json(self) -> dict[str, Any]:
        """Plain figures, ready for `json.dumps`. Those of ranks are the largest, unless they say `mean`."""
        ledger, layout, sent = self.ledger, self.layout, self.bytes_sent
        total, scratch = (np.sum(list(parts.values()), axis=0) for parts in (sent, self.scratch))
        momentum = ledger.momentum * self.momentum_bytes_per_element
        return {
            "gpus": self.num_gpus,
            "grid": {**asdict(self.grid), "efsdp": self.grid.efsdp},
            "replicas": "owning" if self.owning else "one" if self.grid.num_replicas == 1 else "repeated",
            "experts_storage": self.experts,
            "storage": self.storage,
            "units": len(layout.units),
            "units_by_kind": self.units_by_kind,
            "units_local": int(ledger.is_local.sum()),
            "units_routed": int((~ledger.is_local).sum()),
            "owners": int((ledger.flops > 0).sum()),
            "imbalance": layout.imbalance,
            "flops": {
                "total": int(ledger.flops.sum()),
                "mean": float(ledger.flops.mean()),
                "busiest": int(ledger.flops.max()),
                "largest_unit": int(layout.largest_unit_flops),
            },
            "busiest_rank": dict(zip(("replica", "rank"), self.busiest, strict=True)),
            "bytes_sent": int(total.max()),
            "bytes_sent_mean": float(total.mean()),
            "bytes_sent_by_part": {part: int(values.max()) for part, values in sent.items()},
            "collectives": sum(self.collectives.values()),
            "collectives_by_kind": self.collectives,
            "scratch_bytes": int(scratch.max()),
            "scratch_bytes_by_part": {part: int(values.max()) for part, values in self.scratch.items()},
            "momentum_bytes": int(momentum.max()),
            "momentum_bytes_mean": float(momentum.mean()),
            "groups": [asdict(group) for group in self.groups],
            "adamw": {
                "tensors": sum(group.tensors for group in self.groups if group.optimizer == "adamw"),
                "params": sum(group.params for group in self.groups if group.optimizer == "adamw"),
                "matrices": [g.pattern for g in self.groups if g.optimizer == "adamw" and len(g.shape) > 1],
            },
        }


def default_gpus(config: RunConfig) -> int:
    """The ranks of a run where none are given.

    `dp_replicate · dp_shard` where the recipe fixes both; where `dp_shard` is `auto`, as many ranks as the global
    batch gives one microbatch each, so that no gradient is accumulated. Either way it is the recipe's
    `parallel.dp_replicate` that says how many replicas these make.
    """
    if config.parallel.dp_shard != "auto":
        return config.parallel.dp_replicate * config.parallel.dp_shard * config.parallel.cp
    sequences = config.train.global_batch_tokens // config.data.seq_len
    return max(1, sequences // config.train.microbatch_sequences)


def plan_optimizer_step(config: RunConfig, *, num_gpus: int) -> OptimizerPlan:
    """Plans the step of `num_gpus` ranks.

    Raises ConfigError where the degrees of the mesh do not fit them. Communication: none. Time: about two seconds for
    a trillion parameters on 1,536 ranks.
    """
    grid = _grid(config, num_gpus)
    owning = grid.num_replicas > 1 and config.optim.replicas == "owning"
    # As in a run: without owning replicas each plans, and works, as if it were alone.
    planned = grid if owning else Grid(1, grid.num_ranks, grid.ep)
    moe = config.model.moe
    sizes = (moe.expert_hidden_size, config.model.hidden_size)
    by_rows = experts_are_cut(planned, num_experts=moe.num_experts, sizes=sizes)
    assignments = assign_all(parameter_shapes(config.model), config.optim)
    stored = [
        stored_parameter(a.name, a.shape, config.optim, head_dim=config.model.head_dim, experts_by_rows=by_rows)
        for a in assignments
        if a.optimizer == "muon"
    ]
    cost = partial(orthogonalize_flops, num_steps=config.optim.muon.num_steps)
    layout = plan_layout(stored, planned, cost=cost)
    adamw = [_largest_part(a, config, planned, by_rows) for a in assignments if a.optimizer == "adamw"]
    return OptimizerPlan(
        grid=grid,
        owning=owning,
        experts=_expert_storage(config, by_rows),
        num_experts=moe.num_experts,
        groups=_groups(assignments, layout),
        layout=layout,
        ledger=count(layout, cost=cost),
        adamw_elements=sum(adamw),
        adamw_buckets=len(list(buckets(adamw, BUCKET_ELEMENTS))),
        momentum_bytes_per_element=FP32_BYTES if config.optim.muon.momentum_dtype == "fp32" else BF16_BYTES,
    )


def _grid(config: RunConfig, num_gpus: int) -> Grid:
    """The run's grid; a batch that does not divide is no matter here, so each rank has one sequence, in one pass."""
    if num_gpus < 1:
        raise ValueError(f"{num_gpus} GPUs")
    train = config.train.model_copy(update={"global_batch_tokens": num_gpus * config.data.seq_len})
    memory = config.memory.model_copy(update={"sequences_per_gather": 1})
    resolved = resolve(config.model_copy(update={"train": train, "memory": memory}), world_size=num_gpus)
    return Grid(resolved.dp_replicate, resolved.fsdp, resolved.ep)


def _expert_storage(config: RunConfig, by_rows: bool) -> ExpertStorage:
    if config.model.num_dense_layers == config.model.num_layers:
        return "none"
    if config.optim.experts == "adamw":
        return "adamw"
    return "rows" if by_rows else "whole"


def _groups(assignments: list[Assignment], layout: Layout) -> tuple[Group, ...]:
    units = Counter(layout.parameters[unit.parameter].name for unit in layout.units)
    # A setting by name may split the layers of a kind between optimizers.
    takers = dict.fromkeys((a.optimizer, a.reason) for a in assignments)
    taken = [[a for a in assignments if (a.optimizer, a.reason) == taker] for taker in takers]
    return tuple(
        Group(
            pattern=pattern,
            shape=members[0].shape,
            optimizer=members[0].optimizer,
            reason=members[0].reason,
            tensors=len(members),
            params=sum(int(np.prod(a.shape)) for a in members),
            units=sum(units[a.name] for a in members),
        )
        for of_taker in taken
        for pattern, members in by_kind(of_taker).items()
    )


def _largest_part(assignment: Assignment, config: RunConfig, grid: Grid, by_rows: bool) -> int:
    """Elements of a parameter on rank 0, which has no less than any other."""
    if len(assignment.shape) == 1:
        return -(-assignment.shape[0] // grid.num_ranks)
    parameter = stored_parameter(
        assignment.name, assignment.shape, config.optim, head_dim=config.model.head_dim, experts_by_rows=by_rows
    )
    box = parameter.box(grid, 0)
    return (box.expert_stop - box.expert_start) * (box.row_stop - box.row_start) * parameter.columns
