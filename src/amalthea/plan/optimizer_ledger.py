"""What every rank of a layout holds, computes and sends in an optimizer step, counted for all ranks at once.

`flexshard/runtime.py` decides the same for one rank at a time, when it runs; tests hold the two together rank by rank.

Shape legend: U units, P pieces, N replicas, K ranks of a replica. Arrays are int64 or float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amalthea.flexshard.buckets import BUCKET_ELEMENTS, replica_buckets
from amalthea.flexshard.layout import Layout
from amalthea.flexshard.plan import UnitCost

BF16_BYTES, FP32_BYTES = 2, 4
BATCH_ELEMENTS = 1 << 26
"""Of equal matrices that an owner orthogonalizes together on a GPU, or one matrix that is larger."""


@dataclass(frozen=True)
class Ledger:
    """Counts of one step; `elements` are numbers of a matrix, whatever their dtype."""

    is_expert: np.ndarray
    """Bool [U]: the unit is a routed expert's matrix."""
    is_local: np.ndarray
    """Bool [U]: it lies whole with its owner."""
    expert_flops: np.ndarray
    """[N, K], of the units that a rank owns."""
    dense_flops: np.ndarray
    local_flops: np.ndarray
    """[N, K], of local units: what a rank can do while routed ones travel."""
    expert_out: np.ndarray
    """[N, K]: elements of routed experts' pieces that leave a rank towards owners; as many updates come back to it."""
    expert_in: np.ndarray
    """[N, K]: elements that arrive at a rank as the owner; as many updates leave it."""
    dense_out: np.ndarray
    dense_in: np.ndarray
    packed: np.ndarray
    """[N, K]: elements of a rank's pieces of its replica's routed units, its own as owner among them."""
    assembled: np.ndarray
    """[N, K]: elements of the routed units that a rank owns."""
    batch: np.ndarray
    """[N, K]: elements of the largest batch of equal matrices that a rank orthogonalizes."""
    momentum: np.ndarray
    """[N, K]: elements whose momentum a rank keeps: its pieces of the units that its replica owns."""
    stored: np.ndarray
    """[K]: elements that a rank stores of Muon's parameters."""
    replica_bytes: np.ndarray
    """[K]: bytes that leave a rank towards other replicas: gradients to owners in fp32, updates from them in bf16."""
    num_buckets: np.ndarray
    """[K]: rounds of that, a reduce-scatter and an all-gather each."""

    @property
    def flops(self) -> np.ndarray:
        return self.expert_flops + self.dense_flops

    @property
    def all_to_all_bytes(self) -> np.ndarray:
        """[N, K]: bytes that leave a rank on the way to owners and back, in bf16."""
        return BF16_BYTES * (self.expert_out + self.expert_in + self.dense_out + self.dense_in)


def count(layout: Layout, *, cost: UnitCost) -> Ledger:
    """Counts a layout's step. Time and memory: a pass over all pieces."""
    pieces, units = _Pieces.of(layout), _Units.of(layout, cost)
    grid = (layout.grid.num_replicas, layout.grid.num_ranks)

    def by_owner(values: np.ndarray, where: np.ndarray) -> np.ndarray:
        return _sums(grid, units.replica[where], units.owner[where], values[where])

    alone = np.bincount(pieces.unit, minlength=len(units.cost)) == 1
    at_owner = pieces.rank == units.owner[pieces.unit]
    is_local = alone & (np.bincount(pieces.unit, weights=at_owner, minlength=len(units.cost)) == 1)
    routed = ~is_local[pieces.unit]
    travels = routed & ~at_owner
    replica, owner = units.replica[pieces.unit], units.owner[pieces.unit]
    of_expert = units.is_expert[pieces.unit]

    def moved(to: np.ndarray, kind: np.ndarray) -> np.ndarray:
        where = travels & kind
        return _sums(grid, replica[where], to[where], pieces.elements[where])

    replica_bytes, num_buckets = _replica_exchange(layout, pieces, units, is_local)
    return Ledger(
        is_expert=units.is_expert,
        is_local=is_local,
        expert_flops=by_owner(units.cost, units.is_expert),
        dense_flops=by_owner(units.cost, ~units.is_expert),
        local_flops=by_owner(units.cost, is_local),
        expert_out=moved(pieces.rank, of_expert),
        expert_in=moved(owner, of_expert),
        dense_out=moved(pieces.rank, ~of_expert),
        dense_in=moved(owner, ~of_expert),
        packed=_sums(grid, replica[routed], pieces.rank[routed], pieces.elements[routed]),
        assembled=by_owner(units.elements, ~is_local),
        batch=_largest_batch(grid, units),
        momentum=_sums(grid, replica, pieces.rank, pieces.elements),
        stored=np.bincount(pieces.rank, weights=pieces.elements, minlength=grid[1]).astype(np.int64),
        replica_bytes=replica_bytes,
        num_buckets=num_buckets,
    )


@dataclass(frozen=True)
class _Units:
    """Arrays [U] in the layout's order."""

    replica: np.ndarray
    owner: np.ndarray
    parameter: np.ndarray
    expert: np.ndarray
    elements: np.ndarray
    cost: np.ndarray
    is_expert: np.ndarray
    shape: np.ndarray
    """A number for each shape."""

    @classmethod
    def of(cls, layout: Layout, cost: UnitCost) -> _Units:
        owners = np.array(layout.owners, dtype=np.int64).reshape(-1, 2)
        units = np.array(layout.units, dtype=np.int64).reshape(-1, 4)
        columns = np.array([parameter.columns for parameter in layout.parameters], dtype=np.int64)
        stacked = np.array([len(parameter.shape) == 3 for parameter in layout.parameters], dtype=bool)
        rows, number = units[:, 3] - units[:, 2], units[:, 0]
        shapes, shape = np.unique(np.stack([rows, columns[number]], axis=1), axis=0, return_inverse=True)
        prices = np.array([cost(int(r), int(c)) for r, c in shapes], dtype=np.float64)
        return cls(
            replica=owners[:, 0],
            owner=owners[:, 1],
            parameter=number,
            expert=units[:, 1],
            elements=rows * columns[number],
            cost=prices[shape],
            is_expert=stacked[number],
            shape=shape,
        )


@dataclass(frozen=True)
class _Pieces:
    """Arrays [P] in order of units."""

    unit: np.ndarray
    rank: np.ndarray
    elements: np.ndarray

    @classmethod
    def of(cls, layout: Layout) -> _Pieces:
        columns = [layout.parameters[unit.parameter].columns for unit in layout.units]
        rows = [
            (index, piece.rank, (piece.stop - piece.start) * columns[index])
            for index, unit in enumerate(layout.units)
            for piece in layout.pieces(unit)
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return cls(*table.T)


def _sums(grid: tuple[int, int], replica: np.ndarray, rank: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values summed by place, [N, K]; sums of whole numbers below 2^53 are exact."""
    flat = np.bincount(replica * grid[1] + rank, weights=values, minlength=grid[0] * grid[1])
    return flat.reshape(grid) if values.dtype.kind == "f" else flat.reshape(grid).astype(np.int64)


def _largest_batch(grid: tuple[int, int], units: _Units) -> np.ndarray:
    largest = np.zeros(grid, dtype=np.int64)
    for shape in np.unique(units.shape):
        where = units.shape == shape
        owned = _sums(grid, units.replica[where], units.owner[where], np.ones(where.sum(), dtype=np.int64))
        size = int(units.elements[where][0])
        np.maximum(largest, np.minimum(owned, max(1, BATCH_ELEMENTS // size)) * size, out=largest)
    return largest


def _replica_exchange(
    layout: Layout, pieces: _Pieces, units: _Units, is_local: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes sent and rounds of each rank [K], by the sizes of its slabs in order."""
    num_replicas, num_ranks = layout.grid.num_replicas, layout.grid.num_ranks
    sent, rounds = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    if num_replicas == 1:
        return sent, rounds
    by_rank = np.argsort(pieces.rank, kind="stable")
    starts = np.searchsorted(pieces.rank[by_rank], np.arange(num_ranks + 1))
    for rank in range(num_ranks):
        mine = by_rank[starts[rank] : starts[rank + 1]]
        sizes, replicas = _slabs(pieces.elements[mine], pieces.unit[mine], units, is_local)
        for bucket in replica_buckets(
            sizes.tolist(), replicas.tolist(), num_replicas=num_replicas, max_elements=BUCKET_ELEMENTS
        ):
            share = int(np.bincount(replicas[bucket], weights=sizes[bucket]).max())
            sent[rank] += share * (num_replicas - 1) * (FP32_BYTES + BF16_BYTES)
            rounds[rank] += 1
    return sent, rounds


def _slabs(
    elements: np.ndarray, unit: np.ndarray, units: _Units, is_local: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Elements and owning replica of a rank's slabs: neighbouring whole experts of one owner are one slab."""
    if not len(unit):
        return elements, units.replica[unit]
    before, after = unit[:-1], unit[1:]
    joined = (
        is_local[before]
        & is_local[after]
        & (units.parameter[before] == units.parameter[after])
        & (units.replica[before] == units.replica[after])
        & (units.expert[before] + 1 == units.expert[after])
    )
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return np.add.reduceat(elements, first), units.replica[unit[first]]
