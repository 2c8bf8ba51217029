"""On a small model: under a cap between the two demands FSDP2's streams retry in every step, the other way never."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from support.timelines import ROUND
from support.tiny import tiny_config

from amalthea.config.run import RunConfig
from amalthea.core.units import GIB
from amalthea.plan.allocator import replay
from amalthea.plan.check_retries import STEPS, Retries, RetryCheck, check_retries, count_retries
from amalthea.plan.devices import Reserves
from amalthea.plan.events import Trace
from amalthea.plan.setting import Code, Setting
from amalthea.train.build import build
from amalthea.train.step import train_step

CODE = Code(build, train_step)
SETTING = Setting(ROUND, 4, reserves=Reserves(device_gib=0.0))


@cache
def config() -> RunConfig:
    """Wide enough for blocks of parameters beyond the allocator's small pool."""
    model = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    moe = {"num_experts": 8, "top_k": 2, "expert_hidden_size": 512}
    changed = tiny_config(precision="bf16", memory__recompute="block", parallel__ep=1)
    return changed.model_copy(
        update={"model": changed.model.model_copy(update={**model, "moe": changed.model.moe.model_copy(update=moe)})}
    )


@cache
def traces() -> dict[bool, Trace]:
    found = {}
    for is_async in (False, True):
        memory = config().memory.model_copy(update={"unshard_async_op": is_async})
        found[is_async] = SETTING.trace(config().model_copy(update={"memory": memory}), CODE)
    return found


def demand_gib(is_async: bool, expandable: bool) -> float:
    settings = replace(SETTING.allocator, cap_gib=None, expandable_segments=expandable)
    return replay(traces()[is_async], settings=settings, steps=STEPS).demand.peak_reserved.reserved_bytes / GIB


@pytest.mark.case(13)
@pytest.mark.parametrize("expandable", [True, False])
def test_retries_come_with_fsdps_streams_and_go_with_unshard_async_op(expandable: bool) -> None:
    low, high = demand_gib(True, expandable), demand_gib(False, expandable)
    assert low < high
    rows = count_retries(traces(), replace(SETTING.allocator, cap_gib=(low + high) / 2))
    default, own = (row for row in rows if row.expandable_segments == expandable)
    assert (default.unshard_async_op, own.unshard_async_op) == (False, True)
    assert not default.runs_out
    assert not own.runs_out
    assert len(default.by_step) == STEPS
    assert all(default.by_step)
    assert own.by_step == (0,) * STEPS
    # As much is allocated; what other streams' pools hold makes the difference.
    assert default.allocated_bytes == pytest.approx(own.allocated_bytes, rel=0.02)
    assert default.elsewhere_bytes - own.elsewhere_bytes >= default.reserved_bytes - own.reserved_bytes


def test_far_from_the_cap_nothing_retries_and_below_demand_memory_runs_out() -> None:
    roomy = count_retries(traces(), replace(SETTING.allocator, cap_gib=1.0))
    assert {row.by_step for row in roomy} == {(0,) * STEPS}
    for row in count_retries(traces(), replace(SETTING.allocator, cap_gib=0.5 * roomy[0].allocated_bytes / GIB)):
        assert row.runs_out
        assert len(row.by_step) < STEPS


def test_the_verdict_says_what_the_rows_do() -> None:
    high, low = 3 * GIB, 2 * GIB
    rows = (
        Retries(False, True, GIB, high, GIB, (1, 2, 2), runs_out=False),
        Retries(True, True, GIB, low, 0, (0, 0, 0), runs_out=False),
        Retries(False, False, GIB, low, GIB, (2,), runs_out=True),
        Retries(True, False, GIB, high, 0, (0, 0, 0), runs_out=False),
    )
    expandable, default = RetryCheck(("parallel.ep=4",), 2.5, rows).verdict
    assert "2.5 GiB: 5 retries (1 + 2 + 2) with FSDP2's streams, no retry with unshard_async_op" in expandable
    assert expandable.endswith("any cap from 2.0 to 3.0 GiB tells the two apart")
    assert "2 retries (2) and then out of memory with FSDP2's streams" in default
    assert default.endswith("FSDP2's streams demand no more")


def test_a_layout_is_traced_both_ways_under_the_settings_cap() -> None:
    setting = replace(SETTING, cluster=replace(ROUND, hbm_visible_gib=0.17))
    found = check_retries(config(), ("parallel.ep=2",), setting, CODE)
    assert [(row.expandable_segments, row.unshard_async_op) for row in found.rows] == [
        (True, False), (True, True), (False, False), (False, True),
    ]  # fmt: skip
    written = found.to_json()
    assert (written["figures_are"], written["cap_gib"]) == ("simulation", 0.17)
    assert written["overrides"] == ["parallel.ep=2"]
    assert written["rows"][0]["retries_by_step"] == list(found.rows[0].by_step)
