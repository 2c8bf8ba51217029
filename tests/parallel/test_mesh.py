"""Ranks on the axes, and seeds that differ along the axes that are named."""

from __future__ import annotations

import itertools

import pytest
from support.ranks import run_ranks

from amalthea.core.world import World
from amalthea.parallel.mesh import build_mesh
from amalthea.parallel.seeds import seed_for

AXES = ("dp_replicate", "dp_shard", "cp", "efsdp", "ep")


def describe(world: World, dp_replicate: int, dp_shard: int, ep: int) -> tuple[dict[str, int], tuple[int, ...]]:
    """This rank's coordinates, and its degrees with its share of the data."""
    mesh = build_mesh(world, dp_replicate=dp_replicate, dp_shard=dp_shard, ep=ep)
    degrees = (mesh.dp_replicate, mesh.dp_shard, mesh.efsdp, mesh.ep)
    return mesh.coordinates(), (*degrees, mesh.data_rank, mesh.data_ranks)


@pytest.mark.parametrize(
    ("degrees", "coordinates"),
    [
        ((1, 4, 1), [(0, 0, 0, 0), (0, 1, 1, 0), (0, 2, 2, 0), (0, 3, 3, 0)]),
        ((1, 4, 2), [(0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 1, 0), (0, 3, 1, 1)]),
        ((1, 4, 4), [(0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 0, 2), (0, 3, 0, 3)]),
        ((2, 2, 1), [(0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 0, 0), (1, 1, 1, 0)]),
        ((2, 2, 2), [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 0, 0), (1, 1, 0, 1)]),
        ((4, 1, 1), [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0)]),
    ],
    ids=["fsdp", "ep2", "ep4", "hsdp", "hsdp-ep2", "replicas"],
)
def test_coordinates(degrees: tuple[int, int, int], coordinates: list[tuple[int, ...]]) -> None:
    """Neighbours differ in `ep` first, and every rank takes another share of the data."""
    dp_replicate, dp_shard, ep = degrees
    reports = run_ranks(4, describe, *degrees)
    assert [tuple(place[axis] for axis in AXES if axis != "cp") for place, _ in reports] == coordinates
    assert all(place["cp"] == 0 for place, _ in reports)
    assert [figures[:4] for _, figures in reports] == [(dp_replicate, dp_shard, dp_shard // ep, ep)] * 4
    assert [figures[4:] for _, figures in reports] == [(rank, 4) for rank in range(4)]


def with_context(world: World, cp: int, ep: int) -> tuple[dict[str, int], tuple[int, ...]]:
    mesh = build_mesh(world, dp_replicate=1, dp_shard=world.size // cp, ep=ep, cp=cp)
    return mesh.coordinates(), (mesh.fsdp, mesh.dp_shard, mesh.cp, mesh.efsdp, mesh.data_rank, mesh.data_ranks)


def test_ranks_that_share_sequences_are_neighbours_and_take_the_same_share() -> None:
    reports = run_ranks(4, with_context, 2, 4)
    assert [(place["dp_shard"], place["cp"], place["ep"]) for place, _ in reports] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 3),
    ]
    assert [figures for _, figures in reports] == [(4, 2, 2, 1, rank // 2, 2) for rank in range(4)]


def seeds(distinct: tuple[str, ...], *, base: int = 0, purpose: str = "data") -> dict[tuple[int, ...], int]:
    """The seed of each place on a grid of 2 · 3 · 2 · 2."""
    places = itertools.product(range(2), range(3), range(1), range(2), range(2))
    return {
        place: seed_for(base, purpose=purpose, coordinates=dict(zip(AXES, place, strict=True)), distinct=distinct)
        for place in places
    }


@pytest.mark.parametrize("distinct", [c for n in range(5) for c in itertools.combinations(AXES, n)])
def test_seeds_differ_along_the_named_axes_and_nowhere_else(distinct: tuple[str, ...]) -> None:
    by_place = seeds(distinct)
    for (left, one), (right, other) in itertools.combinations(by_place.items(), 2):
        differs = any(a != b for axis, a, b in zip(AXES, left, right, strict=True) if axis in distinct)
        assert (one != other) == differs
    assert all(0 <= seed < 1 << 63 for seed in by_place.values())


def test_seeds_differ_by_base_and_purpose_and_not_by_the_order_of_names() -> None:
    everything = [seeds(AXES), seeds(AXES, base=1), seeds(AXES, purpose="dropout")]
    assert len({seed for part in everything for seed in part.values()}) == 3 * 24
    assert seeds(("ep", "dp_shard")) == seeds(("dp_shard", "ep"))


def test_an_axis_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="pp"):
        seed_for(0, purpose="data", coordinates={"ep": 0}, distinct=["pp"])
