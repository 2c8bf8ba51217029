"""From (stored parameters, grid, cost of a unit) to owners: a pure function, the same on every rank.

A unit that one rank holds whole stays there; with several replicas, any replica's copy of that rank may own it. A unit
cut over ranks goes to whichever rank is least busy, longest first (LPT): a *column* is the same rank of all replicas,
and the column is chosen before the replica, since whole experts fill columns evenly afterwards.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache

from amalthea.flexshard.layout import Grid, Layout, Owner, StoredParameter

UnitCost = Callable[[int, int], float]
"""FLOP of orthogonalizing a matrix of (rows, columns)."""


def plan_layout(parameters: Sequence[StoredParameter], grid: Grid, *, cost: UnitCost) -> Layout:
    """Decides every unit's owner. Deterministic; independent of the rank that asks; cached by its arguments.

    Time grows with the number of units times log(ranks), and not with their pieces.
    """
    return _plan(tuple(parameters), grid, cost)


@lru_cache(maxsize=32)
def _plan(parameters: tuple[StoredParameter, ...], grid: Grid, cost: UnitCost) -> Layout:
    units = [unit for number, parameter in enumerate(parameters) for unit in parameter.units(number)]
    prices = [cost(parameter.head_rows or parameter.rows, parameter.columns) for parameter in parameters]
    costs = [prices[unit.parameter] for unit in units]
    holders = [parameters[unit.parameter].whole_holder(grid, unit) for unit in units]
    longest_first = sorted(range(len(units)), key=lambda index: (-costs[index], index))

    loads = [[0.0] * grid.num_ranks for _ in range(grid.num_replicas)]
    places = [[Owner(replica, rank) for rank in range(grid.num_ranks)] for replica in range(grid.num_replicas)]
    owners: list[Owner] = [places[0][0]] * len(units)

    def give(index: int, rank: int) -> None:
        replica = min(range(grid.num_replicas), key=lambda r: (loads[r][rank], (r + index) % grid.num_replicas))
        loads[replica][rank] += costs[index]
        owners[index] = places[replica][rank]

    columns = [0.0] * grid.num_ranks
    for index, holder in enumerate(holders):
        if holder is not None:
            columns[holder] += costs[index]
    heap = [(load, rank) for rank, load in enumerate(columns)]
    heapq.heapify(heap)
    for index in longest_first:
        if holders[index] is None:
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + costs[index], rank))
            give(index, rank)
    for index in longest_first:
        holder = holders[index]
        if holder is not None:
            give(index, holder)
    return Layout(
        grid=grid,
        parameters=parameters,
        units=tuple(units),
        owners=tuple(owners),
        load_flops=tuple(map(tuple, loads)),
        largest_unit_flops=max(costs, default=0.0),
    )


def digest(layout: Layout) -> int:
    """63 bits that differ between different layouts; ranks compare it before the first step."""
    content = repr((layout.grid, layout.parameters, layout.units, layout.owners))
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big") >> 1
