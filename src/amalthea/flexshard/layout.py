"""Units, storage placement, compute layout: what the planner reads and writes, as frozen values.

A *unit* is a matrix that the optimizer must see whole: one expert's matrix, a whole 2-D matrix, or one head's rows of
a projection. *Storage placement* says which rows of it each rank of a replica holds (*pieces*). *Compute layout* says
which rank of which replica orthogonalizes it: its *owner*. A unit whose only piece lies with its owner is *local* and
sends nothing; any other is *routed*.

Ranks of a replica are numbered efsdp · ep_degree + ep, as the mesh has them. `torch.chunk`'s rule splits n over k: the
first pieces have ceil(n / k), the last may have less or nothing.

Worked cases, [E, R, C] a stack, [R, C] a matrix, on one replica of four ranks:

    storage        example                       pieces
    rows           [10, 8], 4 ranks              rows 0-3 | 3-6 | 6-9 | 9-10: one unit, four pieces, routed
    rows           [10, 8], 1 rank               rows 0-10: one unit, one piece, local
    experts        [8, 6, 4], ep 2 × efsdp 2     experts 0-2 | 4-6 | 2-4 | 6-8 of ranks 0-3: eight local units
    experts        [2, 6, 4], efsdp 4            experts 0 | 1 | none | none: two local units, two ranks idle
    expert_rows    [2, 8, 4], efsdp 4            both experts' rows 0-2 | 2-4 | 4-6 | 6-8: two routed units
    rows, heads 5  [10, 8], 2 ranks              rows 0-5 | 5-10: two units, local each

Shape legend: E experts, R rows, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from amalthea.core.errors import PlacementError

Storage = Literal["rows", "experts", "expert_rows"]


@dataclass(frozen=True)
class Grid:
    """The ranks of a run as the optimizer sees them: `num_replicas` replicas of `num_ranks` ranks each.

    `ep` ranks, neighbours, share one copy of the experts.
    """

    num_replicas: int
    num_ranks: int
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.num_replicas, self.num_ranks, self.ep) < 1 or self.num_ranks % self.ep:
            raise PlacementError(f"{self} is no grid: all degrees must be positive and ep must divide num_ranks")

    @property
    def efsdp(self) -> int:
        return self.num_ranks // self.ep


class Piece(NamedTuple):
    """Rows `start` to `stop` of a matrix, held by rank `rank` of every replica."""

    rank: int
    start: int
    stop: int


class Box(NamedTuple):
    """What a rank holds of a parameter: experts and rows, in global numbers; a 2-D parameter is one expert."""

    expert_start: int
    expert_stop: int
    row_start: int
    row_stop: int


class Unit(NamedTuple):
    """Rows `start` to `stop` of matrix `expert` (0 for a 2-D parameter) of parameter number `parameter`."""

    parameter: int
    expert: int
    start: int
    stop: int


def chunk_range(length: int, count: int, index: int) -> tuple[int, int]:
    """Piece `index` of `length` split over `count` by `torch.chunk`'s rule."""
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


@dataclass(frozen=True)
class StoredParameter:
    """A matrix [R, C] or a stack [E, R, C] and how the ranks of a replica store it.

    `rows`: a 2-D parameter split by rows over all ranks. `experts`: a stack split between experts over `ep`, then over
    `efsdp`. `expert_rows`: a stack split between experts over `ep`, and inside every expert by rows over `efsdp`.
    `head_rows`: rows of one head, where each head is a unit of its own. Raises PlacementError where these do not fit.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    head_rows: int | None = None

    def __post_init__(self) -> None:
        expected = 2 if self.storage == "rows" else 3
        if len(self.shape) != expected:
            raise PlacementError(f"{self.name} {self.shape} is stored as {self.storage}, which has {expected} dims")
        if self.head_rows is not None and (self.storage != "rows" or self.rows % self.head_rows):
            raise PlacementError(
                f"{self.name} {self.shape} cannot be cut into heads of {self.head_rows} rows; "
                "only a 2-D matrix of a multiple of that many rows can"
            )

    @property
    def num_experts(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def units(self, number: int) -> list[Unit]:
        """All units in order; `number` is this parameter's."""
        height = self.head_rows or self.rows
        return [
            Unit(number, expert, start, start + height)
            for expert in range(self.num_experts)
            for start in range(0, self.rows, height)
        ]

    def box(self, grid: Grid, rank: int) -> Box:
        """What `rank` holds."""
        if self.storage == "rows":
            return Box(0, 1, *chunk_range(self.rows, grid.num_ranks, rank))
        efsdp, ep = divmod(rank, grid.ep)
        first, last = chunk_range(self.num_experts, grid.ep, ep)
        if self.storage == "expert_rows":
            return Box(first, last, *chunk_range(self.rows, grid.efsdp, efsdp))
        start, stop = chunk_range(last - first, grid.efsdp, efsdp)
        return Box(first + start, first + stop, 0, self.rows)

    def pieces(self, grid: Grid, unit: Unit) -> list[Piece]:
        """Who holds which rows of `unit` (numbered inside the matrix), in order of rows; never an empty piece."""
        if self.storage == "experts":
            return [Piece(_ranks_of_experts(self.num_experts, grid)[unit.expert], unit.start, unit.stop)]
        if self.storage == "rows":
            return list(_row_pieces(self.rows, grid.num_ranks, unit.start, unit.stop, first_rank=0, stride=1))
        ep = unit.expert // -(-self.num_experts // grid.ep)
        return list(_row_pieces(self.rows, grid.efsdp, unit.start, unit.stop, first_rank=ep, stride=grid.ep))

    def whole_holder(self, grid: Grid, unit: Unit) -> int | None:
        """The rank that holds all of `unit`, if one does: `pieces` without the pieces."""
        if self.storage == "experts":
            return _ranks_of_experts(self.num_experts, grid)[unit.expert]
        size = -(-self.rows // (grid.num_ranks if self.storage == "rows" else grid.efsdp))
        if unit.start // size != (unit.stop - 1) // size:
            return None
        return self.pieces(grid, unit)[0].rank


@lru_cache(maxsize=64)
def _ranks_of_experts(num_experts: int, grid: Grid) -> tuple[int, ...]:
    """The rank that holds each whole expert: split over `ep`, then over `efsdp`."""
    holders = [0] * num_experts
    for rank in range(grid.num_ranks):
        efsdp, ep = divmod(rank, grid.ep)
        first, last = chunk_range(num_experts, grid.ep, ep)
        start, stop = chunk_range(last - first, grid.efsdp, efsdp)
        holders[first + start : first + stop] = [rank] * (stop - start)
    return tuple(holders)


@lru_cache(maxsize=1024)
def _row_pieces(rows: int, splits: int, start: int, stop: int, *, first_rank: int, stride: int) -> tuple[Piece, ...]:
    """Pieces of rows `start` to `stop` of a matrix of `rows` that is split over every `stride`-th rank.

    Cached, like `_ranks_of_experts`: a large model asks for the same few shapes thousands of times.
    """
    size = -(-rows // splits)
    return tuple(
        Piece(first_rank + split * stride, max(start, split * size), min(stop, (split + 1) * size))
        for split in range(start // size, -(-stop // size))
    )


class Owner(NamedTuple):
    """The rank that orthogonalizes a unit."""

    replica: int
    rank: int


@dataclass(frozen=True)
class Layout:
    """A compute layout over a storage placement: every unit with its owner.

    `owners[i]` owns `units[i]`; `load_flops[replica][rank]` is what that rank computes in a step.
    """

    grid: Grid
    parameters: tuple[StoredParameter, ...]
    units: tuple[Unit, ...]
    owners: tuple[Owner, ...]
    load_flops: tuple[tuple[float, ...], ...]
    largest_unit_flops: float

    def pieces(self, unit: Unit) -> list[Piece]:
        return self.parameters[unit.parameter].pieces(self.grid, unit)

    def is_local(self, index: int) -> bool:
        """Whether unit `index` lies whole with its owner."""
        return [piece.rank for piece in self.pieces(self.units[index])] == [self.owners[index].rank]

    @cached_property
    def imbalance(self) -> float:
        """Busiest rank over the bound that no plan can beat: max(mean load, largest unit)."""
        loads = [load for replica in self.load_flops for load in replica]
        bound = max(sum(loads) / len(loads), self.largest_unit_flops)
        return max(loads) / bound if bound else 1.0
