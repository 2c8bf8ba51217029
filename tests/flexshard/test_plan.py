"""Owners: whole experts stay, the rest is spread evenly, and every rank plans the same."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import tiny_config

from amalthea.config.check import resolve
from amalthea.core.errors import PlacementError
from amalthea.core.world import World
from amalthea.flexshard.check import check_layout
from amalthea.flexshard.layout import Grid, Layout, Owner, StoredParameter
from amalthea.flexshard.plan import _plan, digest, plan_layout
from amalthea.model.config import ModelConfig
from amalthea.model.transformer import Transformer
from amalthea.optim import build as optim_build
from amalthea.optim.assign import assign, stored_parameter
from amalthea.optim.config import OptimConfig
from amalthea.optim.flops import orthogonalize_flops
from amalthea.recipes.europa_1t import europa_1t
from amalthea.train.build import build

COST = partial(orthogonalize_flops, num_steps=5)
PLAN_SECONDS = 6.0
"""Of processor time; a busy machine needs several times the 0.8 s of an idle one."""


def stored_parameters(config: ModelConfig, *, per_head: bool = False) -> list[StoredParameter]:
    """What Muon takes of a model, with whole experts."""
    with torch.device("meta"):
        model = Transformer(config)
    optim = OptimConfig.model_validate({"muon": {"per_head": per_head}})
    return [
        stored_parameter(name, tuple(p.shape), optim, head_dim=config.head_dim, experts_by_rows=False)
        for name, p in model.named_parameters()
        if assign(name, tuple(p.shape), optim).optimizer == "muon"
    ]


@pytest.fixture(scope="module")
def europa() -> list[StoredParameter]:
    return stored_parameters(europa_1t().model)


def experts(layout: Layout) -> list[int]:
    return [i for i, unit in enumerate(layout.units) if len(layout.parameters[unit.parameter].shape) == 3]


# The reference model


@pytest.mark.parametrize("ep", [4, 8])
@pytest.mark.parametrize("replicas", [1, 4])
def test_the_reference_model_is_planned_evenly_and_quickly(
    europa: list[StoredParameter], replicas: int, ep: int
) -> None:
    _plan.cache_clear()
    begin = time.process_time()
    layout = plan_layout(europa, Grid(replicas, 384, ep), cost=COST)
    digest(layout)
    assert time.process_time() - begin < PLAN_SECONDS
    assert len(layout.units) == 74 * (3 * 384 + 7)
    assert layout.imbalance <= 1.05
    assert all(layout.is_local(index) for index in experts(layout))
    assert set(Counter(layout.owners[index].rank for index in experts(layout)).values()) == {222}
    # The busiest rank of one replica: 222 experts of 452 GFLOP and its dense share.
    assert max(map(max, layout.load_flops)) == pytest.approx(107.3e12 / replicas, rel=0.02)


@pytest.mark.parametrize("ep", [4, 8])
def test_one_replica_of_more_ranks_than_experts_cannot_be_even(europa: list[StoredParameter], ep: int) -> None:
    """384 whole experts on 1,536 ranks: three quarters have none, and dense matrices are too small to fill the gap.

    1,792 rows do not divide by 384 or 192, so that FSDP cannot cut inside experts either.
    """
    _plan.cache_clear()
    begin = time.process_time()
    layout = plan_layout(europa, Grid(1, 1536, ep), cost=COST)
    assert time.process_time() - begin < PLAN_SECONDS
    assert all(layout.is_local(index) for index in experts(layout))
    assert len({layout.owners[index].rank for index in experts(layout)}) == 384
    assert layout.imbalance == pytest.approx(3.88, abs=0.01)
    # No owner of an expert is given any dense matrix on top.
    busy = {layout.owners[index] for index in experts(layout)}
    dense = set(range(len(layout.units))) - set(experts(layout))
    assert busy.isdisjoint(layout.owners[index] for index in dense)


def test_heads_of_the_reference_model_cost_next_to_nothing() -> None:
    """But lower the mean, while a rank that owns an output projection still has its experts: 107.4 against 102.0."""
    config = europa_1t().model
    layout = plan_layout(stored_parameters(config, per_head=True), Grid(4, 384, 4), cost=COST)
    assert len(layout.units) == 74 * (3 * 384 + 4 + 48 + 2 * 16)
    assert 1.05 < layout.imbalance <= 1.07


# Small numbers of experts


@pytest.mark.parametrize(
    ("ranks", "per_rank", "imbalance"),
    [
        (3, [3, 3, 2], 9 / 8),
        (6, [2, 2, 2, 2, 0, 0], 3 / 2),
        (16, [1] * 8 + [0] * 8, 1.0),
    ],
)
def test_eight_whole_experts(ranks: int, per_rank: list[int], imbalance: float) -> None:
    """By torch.chunk, as FSDP stores them. On 16 ranks the largest unit is the bound."""
    layout = plan_layout([StoredParameter("w", (8, 6, 6), "experts")], Grid(1, ranks), cost=COST)
    check_layout(layout)
    counts = Counter(owner.rank for owner in layout.owners)
    assert [counts[rank] for rank in range(ranks)] == per_rank
    assert all(layout.is_local(index) for index in range(8))
    assert layout.imbalance == pytest.approx(imbalance)


def test_eight_experts_cut_over_sixteen_ranks_go_to_eight_of_them() -> None:
    layout = plan_layout([StoredParameter("w", (8, 16, 6), "expert_rows")], Grid(1, 16), cost=COST)
    check_layout(layout)
    assert max(Counter(owner.rank for owner in layout.owners).values()) == 1
    assert not any(layout.is_local(index) for index in range(8))
    assert layout.imbalance == 1.0


@pytest.mark.parametrize("grid", [Grid(r, ep * efsdp, ep) for r in (1, 2) for ep in (1, 2, 4) for efsdp in (1, 2)])
def test_whole_experts_stay_where_there_are_enough_of_them(grid: Grid) -> None:
    """And nothing of them is routed, whatever else there is to do."""
    stored = [StoredParameter("w", (8, 6, 6), "experts"), StoredParameter("d", (30, 30), "rows")]
    layout = plan_layout(stored, grid, cost=COST)
    for index in range(8):
        assert layout.is_local(index)
        assert layout.pieces(layout.units[index])[0].rank == layout.owners[index].rank


def test_dense_matrices_fill_up_the_ranks_that_experts_leave_idle() -> None:
    stored = [StoredParameter("w", (2, 8, 8), "experts")] + [StoredParameter(f"d{i}", (8, 8), "rows") for i in range(2)]
    layout = plan_layout(stored, Grid(1, 4), cost=COST)
    assert [owner.rank for owner in layout.owners] == [0, 1, 2, 3]


def test_replicas_share_the_units_of_a_rank() -> None:
    layout = plan_layout([StoredParameter("w", (8, 6, 6), "experts")], Grid(2, 2), cost=COST)
    assert Counter(layout.owners) == {Owner(r, k): 2 for r in range(2) for k in range(2)}


def test_the_longest_goes_first() -> None:
    """In order of names the rank that has two short ones would get the long one as well."""
    sizes = [1, 1, 1, 1, 4]
    stored = [StoredParameter(f"w{i}", (2, size), "rows") for i, size in enumerate(sizes)]
    layout = plan_layout(stored, Grid(1, 2), cost=lambda rows, columns: float(columns))
    assert sorted(layout.load_flops[0]) == [4.0, 4.0]
    assert layout.imbalance == 1.0


# The same everywhere


def test_a_plan_does_not_depend_on_earlier_plans() -> None:
    stored = stored_parameters(tiny_config().model)
    first = plan_layout(stored, Grid(2, 4, 2), cost=COST)
    _plan.cache_clear()
    again = plan_layout(list(stored), Grid(2, 4, 2), cost=COST)
    assert again is not first
    assert again == first
    assert digest(again) == digest(first)
    assert plan_layout(stored, Grid(2, 4, 2), cost=COST) is again, "cached by its arguments"


def test_digests_tell_layouts_apart_and_fit_an_int64() -> None:
    stored = stored_parameters(tiny_config().model)
    layout = plan_layout(stored, Grid(1, 4), cost=COST)
    others = [
        plan_layout(stored, Grid(1, 4, 2), cost=COST),
        plan_layout(stored, Grid(2, 4), cost=COST),
        plan_layout([*stored[1:], stored[0]], Grid(1, 4), cost=COST),
        plan_layout(stored[1:], Grid(1, 4), cost=COST),
        other_owner(layout),
    ]
    digests = {digest(made) for made in (layout, *others)}
    assert len(digests) == 1 + len(others)
    assert all(0 <= value < 2**63 for value in digests)


def other_owner(layout: Layout) -> Layout:
    """The same, but for one unit's owner."""
    first, *rest = layout.owners
    return replace(layout, owners=(first._replace(rank=(first.rank + 1) % layout.grid.num_ranks), *rest))


def plan_otherwise_on(world: World, ranks: list[int], overrides: dict[str, object]) -> tuple[int, str]:
    """Builds a run where some ranks' plans are others'; returns the digest without it, and the error."""
    config = tiny_config(optim__matrices="muon", optim__experts="muon", **overrides)
    resolved = resolve(config, world_size=world.size)
    run = build(config, resolved, world)
    assert run.optimizers.muon is not None
    made = digest(run.optimizers.muon.layout)

    def plan(*args: object, **kwargs: object) -> Layout:
        layout = plan_layout(*args, **kwargs)  # type: ignore[arg-type]
        return other_owner(layout) if world.rank in ranks else layout

    with mock.patch.object(optim_build, "plan_layout", plan), pytest.raises(PlacementError) as caught:
        build(config, resolved, world)
    return made, str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([2], "rank 2 planned otherwise than rank 0"),
        ([0], "rank 0 planned otherwise than rank 1"),
        ([1, 3], "rank 1, 3"),
    ],
)
def test_ranks_compare_their_plans_before_the_first_step(ranks: list[int], named: str) -> None:
    answers = run_ranks(4, plan_otherwise_on, ranks, {"parallel__dp_replicate": 2})
    digests, errors = zip(*answers, strict=True)
    assert len(set(digests)) == 1
    assert len(set(errors)) == 1, "every rank raises, with the same words"
    assert named in errors[0]


def test_repeating_replicas_make_the_same_plan() -> None:
    overrides = {"parallel__dp_replicate": 2, "optim__replicas": "repeated"}
    digests, _ = zip(*run_ranks(4, plan_otherwise_on, [1], overrides), strict=True)
    assert len(set(digests)) == 1
