"""The search: what it proposes can be pasted, fits, and is no slower than where it started."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from support.timelines import ROUND
from support.tiny import SEQ_LEN, tiny_config

from amalthea.config.check import resolve
from amalthea.config.overrides import apply_overrides
from amalthea.config.run import RunConfig
from amalthea.plan import search as searching
from amalthea.plan.clusters import get_cluster
from amalthea.plan.levers import ladder, levers
from amalthea.plan.search import combinations, overrides_of, search
from amalthea.plan.setting import Code, Setting
from amalthea.plan.sketch import sketch
from amalthea.recipes.europa_1t import europa_1t
from amalthea.train.build import build
from amalthea.train.step import train_step

CODE = Code(build, train_step)
SETTING = Setting(replace(ROUND, hbm_gb=5.0), 4)


@cache
def start() -> RunConfig:
    return tiny_config(
        precision="bf16",
        model__num_layers=1,
        train__global_batch_tokens=4 * SEQ_LEN,
        train__microbatch_sequences=1,
        memory__recompute="block",
    )


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "TRACED", 3)


def test_overrides_lead_to_the_layout() -> None:
    seen = 0
    for changed in list(combinations(start(), SETTING))[::37]:
        assert apply_overrides(start(), overrides_of(start(), changed)) == changed
        seen += 1
    assert seen > 3


def test_levers_add_up(few: None) -> None:
    """Each is tried on the best so far, so that the winner has all that helped."""
    cluster = replace(SETTING.cluster, gpu="H100")
    found = search(start(), replace(SETTING, cluster=cluster), CODE)
    assert found.best is not None
    tried = [set(one.overrides) for one in (*found.ranked, *found.infeasible)]
    assert any("flash_attention=fa3" in overrides and len(overrides) > 1 for overrides in tried)
    for one in found.ranked[:3]:
        resolve(apply_overrides(start(), one.overrides), world_size=4)


@pytest.mark.usefixtures("few")
def test_the_best_fits_and_is_no_slower_than_the_others() -> None:
    said: list[str] = []
    found = search(start(), SETTING, CODE, say=said.append)
    assert found.best is not None
    rates = [one.tokens_per_s_per_gpu for one in found.ranked]
    assert rates == sorted(rates, reverse=True)
    assert all(one.problem is None for one in found.ranked)
    assert all(one.problem for one in found.infeasible)
    again = apply_overrides(start(), found.best.overrides)
    resolve(again, world_size=4)
    assert sketch(again, SETTING, CODE).tokens_per_s_per_gpu == pytest.approx(rates[0])
    assert found.num_considered > sum(found.refused.values())
    assert said[1].startswith("search 1 of 4")


def test_what_cannot_fit_is_refused_by_arithmetic_with_the_reason() -> None:
    tiny = replace(SETTING, cluster=replace(SETTING.cluster, hbm_visible_gib=0.001))
    said: list[str] = []
    found = search(start(), tiny, CODE, say=said.append)
    assert found.best is None
    assert sum(count for reason, count in found.refused.items() if reason.startswith("device memory")) > 0
    assert len(said) == 2  # the recipe itself is traced all the same
    assert found.limits() == ("no layout fits",)


def test_the_ladder_changes_one_thing_at_a_time() -> None:
    rungs = ladder(start(), SETTING, CODE)
    for before, after in pairwise(rungs):
        assert after.overrides[: len(before.overrides)] == before.overrides
        assert after.overrides != before.overrides
    first: Any = rungs[0].to_json()
    assert first["tokens_per_s_per_gpu"] == pytest.approx(first["step_s"] and rungs[0].sketch.tokens / first["step_s"])
    assert rungs[-1].sketch.tokens == 2 * rungs[0].sketch.tokens


def test_the_reference_models_ladder_is_the_same_from_any_layout() -> None:
    setting = Setting(get_cluster("jupiter"), 1536)
    best = (
        "parallel.cp=4",
        "parallel.dispatch_chunks=2",
        "train.microbatch_sequences=2",
        "train.global_batch_tokens=201326592",
        "memory.sequences_per_gather=4",
        "memory.offload_budget_gib=94",
        "flash_attention=fa3",
    )
    ladders = [
        [(lever.name, lever.overrides) for lever in levers(apply_overrides(europa_1t(), changes), setting)]
        for changes in ((), best)
    ]
    assert ladders[0] == ladders[1]
    config = europa_1t()
    for _, overrides in ladders[0]:
        config = apply_overrides(config, overrides)
        resolve(config, world_size=1536)
