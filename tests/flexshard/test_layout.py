"""Placements say exactly who holds what, and an unsound layout is refused.

Shape legend: E experts, R rows, C columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amalthea.core.errors import PlacementError
from amalthea.flexshard.check import check_layout
from amalthea.flexshard.layout import (
    Box,
    Grid,
    Layout,
    Owner,
    Piece,
    StoredParameter,
    Unit,
    chunk_range,
)
from amalthea.flexshard.plan import plan_layout
from amalthea.flexshard.runtime import Slab, slabs_of

FOUR = Grid(1, 4)


def cost(rows: int, columns: int) -> float:
    return float(rows * columns)


def plan(*parameters: StoredParameter, grid: Grid = FOUR) -> Layout:
    return plan_layout(parameters, grid, cost=cost)


def ranges(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    return [tuple(piece) for piece in pieces]


# The worked cases


def test_rows_on_four_ranks_are_one_routed_unit_of_four_pieces() -> None:
    layout = plan(StoredParameter("w", (10, 8), "rows"))
    assert layout.units == (Unit(0, 0, 0, 10),)
    assert ranges(layout.pieces(layout.units[0])) == [(0, 0, 3), (1, 3, 6), (2, 6, 9), (3, 9, 10)]
    assert not layout.is_local(0)


def test_rows_on_one_rank_are_one_local_unit() -> None:
    layout = plan(StoredParameter("w", (10, 8), "rows"), grid=Grid(1, 1))
    assert ranges(layout.pieces(layout.units[0])) == [(0, 0, 10)]
    assert layout.is_local(0)


def test_experts_over_ep_and_then_efsdp_are_local_units() -> None:
    stored = StoredParameter("w", (8, 6, 4), "experts")
    layout = plan(stored, grid=Grid(1, 4, ep=2))
    boxes = [stored.box(layout.grid, rank) for rank in range(4)]
    assert boxes == [Box(0, 2, 0, 6), Box(4, 6, 0, 6), Box(2, 4, 0, 6), Box(6, 8, 0, 6)]
    assert [owner.rank for owner in layout.owners] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert all(layout.is_local(index) for index in range(8))


def test_fewer_experts_than_ranks_leave_ranks_idle() -> None:
    stored = StoredParameter("w", (2, 6, 4), "experts")
    layout = plan(stored)
    assert [tuple(stored.box(FOUR, rank))[:2] for rank in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert [owner.rank for owner in layout.owners] == [0, 1]
    assert layout.is_local(0)
    assert layout.is_local(1)
    assert layout.load_flops == ((24.0, 24.0, 0.0, 0.0),)


def test_experts_cut_by_rows_are_routed_units() -> None:
    layout = plan(StoredParameter("w", (2, 8, 4), "expert_rows"))
    for expert, unit in enumerate(layout.units):
        assert unit == Unit(0, expert, 0, 8)
        assert ranges(layout.pieces(unit)) == [(0, 0, 2), (1, 2, 4), (2, 4, 6), (3, 6, 8)]
    assert not layout.is_local(0)
    assert not layout.is_local(1)


def test_experts_cut_by_rows_under_expert_parallelism_stay_with_their_ep_rank() -> None:
    layout = plan(StoredParameter("w", (2, 8, 4), "expert_rows"), grid=Grid(1, 4, ep=2))
    assert [ranges(layout.pieces(unit)) for unit in layout.units] == [[(0, 0, 4), (2, 4, 8)], [(1, 0, 4), (3, 4, 8)]]


def test_heads_that_lie_whole_on_a_rank_are_local_units() -> None:
    layout = plan(StoredParameter("w", (10, 8), "rows", head_rows=5), grid=Grid(1, 2))
    assert layout.units == (Unit(0, 0, 0, 5), Unit(0, 0, 5, 10))
    assert [ranges(layout.pieces(unit)) for unit in layout.units] == [[(0, 0, 5)], [(1, 5, 10)]]
    assert layout.owners == (Owner(0, 0), Owner(0, 1))
    assert layout.is_local(0)
    assert layout.is_local(1)


def test_a_head_that_a_rank_boundary_cuts_is_routed() -> None:
    layout = plan(StoredParameter("w", (12, 8), "rows", head_rows=4), grid=Grid(1, 2))
    assert [ranges(layout.pieces(unit)) for unit in layout.units] == [[(0, 0, 4)], [(0, 4, 6), (1, 6, 8)], [(1, 8, 12)]]
    assert [layout.is_local(index) for index in range(3)] == [True, False, True]


@given(length=st.integers(1, 60), count=st.integers(1, 20))
def test_chunk_range_is_torch_chunk(length: int, count: int) -> None:
    chunks = [tuple(chunk.tolist()) for chunk in torch.arange(length).chunk(count)]
    ours = [tuple(range(*chunk_range(length, count, index))) for index in range(count)]
    assert ours[: len(chunks)] == chunks
    assert not any(ours[len(chunks) :])


@pytest.mark.parametrize(("replicas", "ranks", "ep"), [(0, 4, 1), (1, 0, 1), (1, 4, 0), (1, 4, 3)])
def test_what_is_no_grid(replicas: int, ranks: int, ep: int) -> None:
    with pytest.raises(PlacementError, match="is no grid"):
        Grid(replicas, ranks, ep)


@pytest.mark.parametrize(
    ("shape", "storage", "heads"),
    [
        ((4, 8, 8), "rows", None),
        ((8, 8), "experts", None),
        ((8,), "rows", None),
        ((10, 8), "rows", 4),
        ((2, 8, 8), "experts", 4),
    ],
)
def test_what_is_no_stored_parameter(shape: tuple[int, ...], storage: str, heads: int | None) -> None:
    with pytest.raises(PlacementError, match=r"^w \("):
        StoredParameter("w", shape, storage, heads)  # type: ignore[arg-type]


# Any parameters on any grid


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    ep, efsdp = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return Grid(draw(st.integers(1, 3)), ep * efsdp, ep)


@st.composite
def stored_parameters(draw: st.DrawFn, grid: Grid) -> StoredParameter:
    columns = draw(st.integers(1, 4))
    storage = draw(st.sampled_from(["rows", "heads", "experts", "expert_rows"]))
    name = f"w{draw(st.integers(0, 99))}"
    if storage == "rows":
        return StoredParameter(name, (draw(st.integers(1, 23)), columns), "rows")
    if storage == "heads":
        head_rows, heads = draw(st.integers(1, 5)), draw(st.integers(1, 6))
        return StoredParameter(name, (heads * head_rows, columns), "rows", head_rows)
    num_experts = grid.ep * draw(st.integers(1, 5))
    rows = draw(st.integers(1, 7))
    if storage == "expert_rows":
        rows *= grid.efsdp
    return StoredParameter(name, (num_experts, rows, columns), storage)  # type: ignore[arg-type]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    grid = draw(grids())
    return plan(*draw(st.lists(stored_parameters(grid), min_size=1, max_size=3)), grid=grid)


def elements_of(slab: Slab) -> Iterator[tuple[int, int, int]]:
    for expert in range(slab.expert, slab.expert + slab.last - slab.first):
        for row in range(slab.row, slab.row + slab.bottom - slab.top):
            yield slab.parameter, expert, row


@settings(max_examples=80, deadline=None)
@given(layout=layouts())
def test_every_layout_is_sound_and_its_views_agree(layout: Layout) -> None:
    """check_layout passes; boxes tile; pieces lie in boxes; the ranks' slabs hold each unit's pieces once."""
    check_layout(layout)
    grid = layout.grid
    for stored in layout.parameters:
        holders = Counter(
            (expert, row)
            for box in (stored.box(grid, rank) for rank in range(grid.num_ranks))
            for expert in range(box.expert_start, box.expert_stop)
            for row in range(box.row_start, box.row_stop)
        )
        assert holders == {(expert, row): 1 for expert in range(stored.num_experts) for row in range(stored.rows)}

    stored_rows: Counter[tuple[int, int, int, int]] = Counter()
    for rank in range(grid.num_ranks):
        for slab in slabs_of(layout, rank=rank):
            assert all(layout.owners[index] == slab.owner for index in slab.units)
            assert slab.is_local == all(layout.is_local(index) for index in slab.units)
            assert len(slab.units) == slab.last - slab.first
            stored_rows.update((rank, *element) for element in elements_of(slab))
    of_pieces = Counter(
        (piece.rank, unit.parameter, unit.expert, row)
        for unit in layout.units
        for piece in layout.pieces(unit)
        for row in range(piece.start, piece.stop)
    )
    assert stored_rows == of_pieces
    assert set(of_pieces.values()) == {1}
    loads = Counter[Owner]()
    for unit, owner in zip(layout.units, layout.owners, strict=True):
        loads[owner] += int(cost(unit.stop - unit.start, layout.parameters[unit.parameter].columns))
    assert {Owner(*at): load for at, load in _numbered(layout.load_flops) if load} == loads


def _numbered(loads: tuple[tuple[float, ...], ...]) -> Iterator[tuple[tuple[int, int], float]]:
    for replica, of_replica in enumerate(loads):
        for rank, load in enumerate(of_replica):
            yield (replica, rank), load


@settings(max_examples=50, deadline=None)
@given(layout=layouts())
def test_a_slab_is_the_part_of_the_local_tensor_that_it_says(layout: Layout) -> None:
    """Each element of the whole parameter is its own number; a slab's view must hold those that it names."""
    for rank in range(layout.grid.num_ranks):
        for slab in slabs_of(layout, rank=rank):
            stored = layout.parameters[slab.parameter]
            whole = torch.arange(stored.num_experts * stored.rows * stored.columns).view(
                -1, stored.rows, stored.columns
            )
            box = stored.box(layout.grid, rank)
            local = whole[box.expert_start : box.expert_stop, box.row_start : box.row_stop]
            view = slab.view(local if len(stored.shape) == 3 else local[0])
            assert view.is_contiguous(), "packing and momenta take it for flat"
            height = slab.bottom - slab.top
            wanted = whole[slab.expert : slab.expert + slab.last - slab.first, slab.row : slab.row + height]
            assert torch.equal(view, wanted)


def test_neighbouring_experts_of_one_owner_are_one_slab() -> None:
    """So that a step handles few tensors; with owning replicas as many slabs as owners take turns."""
    stored = StoredParameter("w", (8, 6, 4), "experts")
    (slab,) = slabs_of(plan(stored, grid=Grid(1, 2)), rank=1)
    assert (slab.expert, slab.first, slab.last, slab.units) == (4, 0, 4, (4, 5, 6, 7))
    shared = slabs_of(plan(stored, grid=Grid(2, 2)), rank=1)
    assert [slab.units for slab in shared] == [(4,), (5,), (6,), (7,)]
    assert [slab.owner.replica for slab in shared] in ([0, 1, 0, 1], [1, 0, 1, 0])


# Unsound layouts

SOUND = plan(StoredParameter("a", (10, 8), "rows"), StoredParameter("b", (2, 8, 4), "expert_rows"))


def broken(**changes: object) -> str:
    with pytest.raises(PlacementError) as caught:
        check_layout(replace(SOUND, **changes))  # type: ignore[arg-type]
    return str(caught.value)


def test_the_sound_one_passes() -> None:
    check_layout(SOUND)


def test_rows_in_no_unit_are_refused() -> None:
    a, *rest = SOUND.units
    assert "a, expert 0: its last rows" in broken(units=(a._replace(stop=9), *rest))
    assert "a: rows 0-1 in no unit" in broken(units=(a._replace(start=1), *rest))
    assert "b, expert 1: its last rows" in broken(units=SOUND.units[:-1], owners=SOUND.owners[:-1])


def test_rows_in_two_units_are_refused() -> None:
    a, *rest = SOUND.units
    twice = (a._replace(stop=6), a._replace(start=5), *rest)
    assert "a: row 5 is in two units" in broken(units=twice, owners=(*SOUND.owners, Owner(0, 0)))
    again = (*SOUND.units, SOUND.units[-1])
    assert "b: row 0 is in two units" in broken(units=again, owners=(*SOUND.owners, Owner(0, 0)))


def test_a_unit_beyond_the_matrix_is_refused() -> None:
    a, *rest = SOUND.units
    too_long = broken(units=(a._replace(stop=12), *rest))
    assert "a: Unit(parameter=0, expert=0, start=0, stop=12) is not inside (10, 8)" in too_long
    extra = SOUND.units[-1]._replace(expert=2)
    too_many = broken(units=(*SOUND.units, extra), owners=(*SOUND.owners, Owner(0, 0)))
    assert "expert=2, start=0, stop=8) is not inside (2, 8, 4)" in too_many


def test_units_without_owners_are_refused() -> None:
    assert "3 units have 2 owners" in broken(owners=SOUND.owners[:2])


@pytest.mark.parametrize("owner", [Owner(0, 4), Owner(1, 0), Owner(-1, 0), Owner(0, -1)])
def test_an_owner_outside_the_grid_is_refused(owner: Owner) -> None:
    assert "a, expert 0, rows 0-10: the owner" in broken(owners=(owner, *SOUND.owners[1:]))


class Misplaced(StoredParameter):
    """Says that rank 0 holds what rank 1 holds, and the other way round."""

    def pieces(self, grid: Grid, unit: Unit) -> list[Piece]:
        swapped = {0: 1, 1: 0}
        return [p._replace(rank=swapped.get(p.rank, p.rank)) for p in super().pieces(grid, unit)]


class Gappy(StoredParameter):
    """Forgets the second piece of a unit."""

    def pieces(self, grid: Grid, unit: Unit) -> list[Piece]:
        first, _, *rest = super().pieces(grid, unit)
        return [first, *rest]


class Short(StoredParameter):
    """Forgets the last piece of a unit."""

    def pieces(self, grid: Grid, unit: Unit) -> list[Piece]:
        return super().pieces(grid, unit)[:-1]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Misplaced, "a: rank 1 is to send rows 0-3 of expert 0, but it holds"),
        (Gappy, "does not follow row 3"),
        (Short, "its pieces end at row 9"),
    ],
)
def test_pieces_that_their_ranks_do_not_hold_are_refused(kind: type[StoredParameter], message: str) -> None:
    assert message in broken(parameters=(kind("a", (10, 8), "rows"), SOUND.parameters[1]))


def test_the_bound_on_scratch_counts_routed_units_in_bf16() -> None:
    """One rank owns both [8, 4] experts, 128 bytes, or another the [10, 8] matrix, 160 bytes: the largest decides."""
    check_layout(SOUND, max_scratch_bytes=160)
    with pytest.raises(PlacementError, match="would assemble 160 bytes of matrices, more than 159"):
        check_layout(SOUND, max_scratch_bytes=159)
    local = plan(StoredParameter("e", (4, 8, 8), "experts"))
    check_layout(local, max_scratch_bytes=0)
