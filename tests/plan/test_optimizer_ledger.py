"""The counts for all ranks at once equal what the runtime makes of a layout on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from amalthea.flexshard.layout import Grid, Layout, StoredParameter
from amalthea.flexshard.plan import plan_layout
from amalthea.flexshard.runtime import ReplicaExchange, UnitExchange, slabs_of
from amalthea.optim import dist_muon
from amalthea.optim.flops import orthogonalize_flops
from amalthea.plan import optimizer_ledger
from amalthea.plan.optimizer_ledger import BATCH_ELEMENTS, Ledger, count

COST = partial(orthogonalize_flops, num_steps=5)


def parameters(*, num_experts: int = 8, by_rows: bool = False, heads: bool = False) -> list[StoredParameter]:
    """Two layers of every kind of parameter, of shapes that no number of ranks divides except where they must."""
    storage = "expert_rows" if by_rows else "experts"
    return [
        parameter
        for layer in range(2)
        for parameter in (
            StoredParameter(f"{layer}.wq", (20, 14), "rows", 4 if heads else None),
            StoredParameter(f"{layer}.wo", (14, 20), "rows"),
            StoredParameter(f"{layer}.w_up", (num_experts, 12, 14), storage),
            StoredParameter(f"{layer}.w_down", (num_experts, 24, 12), storage),
        )
    ]


CASES: dict[str, tuple[list[StoredParameter], Grid]] = {
    "one rank": (parameters(), Grid(1, 1)),
    "fsdp 4": (parameters(), Grid(1, 4)),
    "ep 2, efsdp 2": (parameters(), Grid(1, 4, 2)),
    "ep 4": (parameters(), Grid(1, 4, 4)),
    "8 experts, 3 ranks": (parameters(), Grid(1, 3)),
    "8 experts, 6 ranks": (parameters(), Grid(1, 6)),
    "2 experts, 4 ranks, idle": (parameters(num_experts=2), Grid(1, 4)),
    "2 experts, 4 ranks, cut": (parameters(num_experts=2, by_rows=True), Grid(1, 4)),
    "ep 2, cut over 3": (parameters(num_experts=4, by_rows=True), Grid(1, 6, 2)),
    "heads": (parameters(heads=True), Grid(1, 3)),
    "2 replicas": (parameters(), Grid(2, 2)),
    "2 replicas, ep 2": (parameters(heads=True), Grid(2, 4, 2)),
    "3 replicas, neighbours merge": (parameters(num_experts=9), Grid(3, 2)),
    "2 replicas, cut": (parameters(num_experts=2, by_rows=True), Grid(2, 4)),
    "no matrix": ([], Grid(2, 2)),
}


@pytest.fixture(params=CASES, ids=str)
def counted(request: pytest.FixtureRequest) -> tuple[Layout, Ledger]:
    stored, grid = CASES[request.param]
    layout = plan_layout(stored, grid, cost=COST)
    return layout, count(layout, cost=COST)


def places(layout: Layout) -> list[tuple[int, int]]:
    return [(replica, rank) for replica in range(layout.grid.num_replicas) for rank in range(layout.grid.num_ranks)]


def test_all_to_all_bytes_are_those_of_every_rank(counted: tuple[Layout, Ledger]) -> None:
    layout, ledger = counted
    for replica, rank in places(layout):
        exchange = UnitExchange(layout, slabs_of(layout, rank=rank), replica=replica, rank=rank, group=None)
        assert ledger.all_to_all_bytes[replica, rank] == exchange.bytes_sent
        routed = [not layout.is_local(i) for i, owner in enumerate(layout.owners) if owner.replica == replica]
        assert sum(routed) == exchange.num_routed
    assert ledger.is_local.tolist() == [layout.is_local(index) for index in range(len(layout.units))]
    # What leaves some rank arrives at another.
    assert ledger.expert_out.sum() == ledger.expert_in.sum()
    assert ledger.dense_out.sum() == ledger.dense_in.sum()


@pytest.mark.parametrize("max_elements", [1, 500, 1 << 26])
def test_replica_bytes_are_those_of_every_rank(
    counted: tuple[Layout, Ledger], max_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, _ = counted
    monkeypatch.setattr(optimizer_ledger, "BUCKET_ELEMENTS", max_elements)
    ledger = count(layout, cost=COST)
    for rank in range(layout.grid.num_ranks):
        if layout.grid.num_replicas == 1:
            assert (ledger.replica_bytes[rank], ledger.num_buckets[rank]) == (0, 0)
            continue
        exchange = ReplicaExchange(
            slabs_of(layout, rank=rank),
            [parameter.columns for parameter in layout.parameters],
            replica=0,
            num_replicas=layout.grid.num_replicas,
            group=cast(Any, None),
            max_elements=max_elements,
        )
        assert (ledger.replica_bytes[rank], ledger.num_buckets[rank]) == (exchange.bytes_sent(), exchange.num_buckets)


def test_momentum_and_storage_are_the_slabs_of_every_rank(counted: tuple[Layout, Ledger]) -> None:
    layout, ledger = counted
    for rank in range(layout.grid.num_ranks):
        sizes = [0] * layout.grid.num_replicas
        for slab in slabs_of(layout, rank=rank):
            columns = layout.parameters[slab.parameter].columns
            sizes[slab.owner.replica] += (slab.last - slab.first) * (slab.bottom - slab.top) * columns
        assert ledger.momentum[:, rank].tolist() == sizes
        assert ledger.stored[rank] == sum(sizes)
    elements = sum(p.num_experts * p.rows * p.columns for p in layout.parameters)
    assert ledger.momentum.sum() == elements


def test_flops_are_the_planners(counted: tuple[Layout, Ledger]) -> None:
    layout, ledger = counted
    np.testing.assert_array_equal(ledger.flops, np.array(layout.load_flops))
    local = sum(cost for cost, is_local in zip(_costs(layout), ledger.is_local, strict=True) if is_local)
    assert ledger.local_flops.sum() == local
    stacked = {number for number, p in enumerate(layout.parameters) if len(p.shape) == 3}
    assert ledger.is_expert.tolist() == [unit.parameter in stacked for unit in layout.units]


def _costs(layout: Layout) -> Sequence[float]:
    return [COST(unit.stop - unit.start, layout.parameters[unit.parameter].columns) for unit in layout.units]


def test_assembled_units_and_batches_are_those_of_owners(counted: tuple[Layout, Ledger]) -> None:
    layout, ledger = counted
    for replica, rank in places(layout):
        mine = [i for i, owner in enumerate(layout.owners) if (owner.replica, owner.rank) == (replica, rank)]
        shapes = [
            (unit.stop - unit.start, layout.parameters[unit.parameter].columns)
            for unit in (layout.units[i] for i in mine)
        ]
        routed = [r * c for i, (r, c) in zip(mine, shapes, strict=True) if not layout.is_local(i)]
        assert ledger.assembled[replica, rank] == sum(routed)
        slabs = [s for s in slabs_of(layout, rank=rank) if s.owner.replica == replica and not s.is_local]
        columns = [layout.parameters[slab.parameter].columns for slab in slabs]
        pieces = [(s.last - s.first) * (s.bottom - s.top) * c for s, c in zip(slabs, columns, strict=True)]
        assert ledger.packed[replica, rank] == sum(pieces)
        batches = [shapes.count(shape) * shape[0] * shape[1] for shape in set(shapes)]
        assert ledger.batch[replica, rank] == max(batches, default=0)


@pytest.mark.parametrize(("max_elements", "matrices"), [(1, 1), (168, 1), (335, 1), (336, 2), (10**6, 8)])
def test_a_batch_is_bounded(max_elements: int, matrices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_ledger, "BATCH_ELEMENTS", max_elements)
    layout = plan_layout([StoredParameter("w", (8, 12, 14), "experts")], Grid(1, 1), cost=COST)
    assert count(layout, cost=COST).batch.tolist() == [[matrices * 12 * 14]]


def test_the_batch_is_the_optimizers() -> None:
    assert BATCH_ELEMENTS == dist_muon._BATCH_ELEMENTS_ELSEWHERE
