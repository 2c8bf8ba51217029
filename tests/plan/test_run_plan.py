"""The plan of a run as a whole: its figures agree with one another and with arithmetic, and misfits say why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.timelines import ROUND
from support.tiny import SEQ_LEN, tiny_config

from amalthea.core.errors import ConfigError
from amalthea.plan.accounting import account
from amalthea.plan.clusters import Cluster
from amalthea.plan.devices import Reserves
from amalthea.plan.run_plan import RunPlan, plan_run
from amalthea.plan.setting import Code, Setting
from amalthea.plan.trace import Workload
from amalthea.train.build import build
from amalthea.train.step import train_step

CODE = Code(build, train_step)
ROOMY = replace(ROUND, hbm_gb=10.0, gpu_watts=500, time_limit_h=1)


def planned(cluster: Cluster = ROOMY, *, workload: Workload | None = None, rank: int = 0, **overrides: Any) -> RunPlan:
    values: dict[str, Any] = {
        "precision": "bf16",
        "optim__experts": "muon",
        "optim__matrices": "muon",
        "parallel__ep": 2,
        "memory__recompute": "block",
        "train__microbatch_sequences": 2,
    }
    config = tiny_config(**values | overrides)
    setting = Setting(cluster, 4, rank=rank, workload=workload or Workload(), reserves=Reserves(device_gib=0.0))
    return plan_run(config, setting, CODE)


def test_figures_agree_with_one_another() -> None:
    plan = planned()
    document = plan.to_json()
    timeline, memory, budget = document["timeline"], document["memory"], document["budget"]
    parts = timeline["compute_s"] + timeline["exposed_comm_s"] + timeline["idle_s"]
    assert parts == pytest.approx(timeline["step_s"])
    tokens = 8 * SEQ_LEN // 4
    assert timeline["tokens_per_s_per_gpu"] == pytest.approx(tokens / timeline["step_s"])
    flops = account(plan.config.model, seq_len=SEQ_LEN).flops_per_token.full_causal.model_total
    assert timeline["mfu"] == pytest.approx(flops * tokens / timeline["step_s"] / 100e12)
    assert timeline["hfu"] > timeline["mfu"]
    assert sum(memory["by_class_gib"].values()) == pytest.approx(memory["allocated_gib"])
    assert 0 < document["optimizer"]["step_s"] < timeline["step_s"]
    assert budget["tokens"] == 20 * 8 * SEQ_LEN
    assert budget["gpu_hours"] == pytest.approx(budget["wall_clock_h"] * 4)
    assert budget["energy_mwh"] == pytest.approx(budget["gpu_hours"] * 500 / 1e6)
    json.dumps(document)


def test_the_third_flash_attention_is_faster_and_runs_on_hopper_only() -> None:
    second = planned()
    third = planned(replace(ROOMY, gpu="GH200"), flash_attention="fa3")
    assert third.timeline.assumptions.attention > second.timeline.assumptions.attention
    with pytest.raises(ConfigError, match=r"flash_attention is fa3.* has A100; set flash_attention=auto"):
        planned(replace(ROOMY, gpu="A100"), flash_attention="fa3")


@pytest.mark.case(13)
def test_allocated_reserved_and_stranded_are_told_apart() -> None:
    memory = planned().to_json()["memory"]
    assert memory["reserved_gib"] >= memory["allocated_gib"] > 0
    assert memory["stranded_gib"] == pytest.approx(sum(memory["stranded_by_stream_gib"].values()))
    assert memory["stranded_gib"] > 0


@pytest.mark.case(11)
def test_a_run_that_does_not_fit_says_why_and_what_would() -> None:
    roomy = planned(memory__recompute="none")
    used = roomy.memory.demand.peak_allocated.allocated_bytes / 1024**3
    tight = replace(ROOMY, hbm_visible_gib=used * 0.95)
    plan = planned(tight, memory__recompute="none")
    memory = plan.to_json()["memory"]
    assert memory["fits"] is False
    assert "device memory runs out in" in memory["problems"][0]
    assert memory["would_fit"]
    assert roomy.fits
    assert not roomy.remedies


def test_host_memory_counts_too() -> None:
    plan = planned(replace(ROOMY, host_gb=1e-6), memory__offload=True)
    assert not plan.fits
    assert any(problem.startswith("host memory") for problem in plan.problems)


@pytest.mark.case(12)
def test_experts_are_priced_as_experts() -> None:
    """A rank whose experts take more of the load holds and computes more; one with more experts holds more."""
    even, hot = planned(), planned(workload=Workload(expert_load=(3.0,) * 4 + (1.0,) * 4))
    assert hot.memory.demand.peak_allocated.allocated_bytes > even.memory.demand.peak_allocated.allocated_bytes
    assert hot.timeline.hfu * hot.timeline.step_s > even.timeline.hfu * even.timeline.step_s
    many = planned(model__moe__num_experts=16)
    assert (
        many.memory.demand.peak_allocated.by_class["parameters"]
        > (even.memory.demand.peak_allocated.by_class["parameters"])
    )
    done = {name: plan.timeline.hfu * plan.timeline.step_s for name, plan in (("8", even), ("16", many))}
    assert done["16"] == pytest.approx(done["8"], rel=0.1)


def test_each_part_says_what_it_is_and_leans_on() -> None:
    document = planned().to_json()
    for part in ("memory", "optimizer", "timeline"):
        assert document[part]["figures_are"] == "simulation"
        assert set(document[part]["leans_on"]) == {"assumption", "sensitivity"}
    assert document["budget"]["figures_are"] == "estimate"


def test_a_cluster_that_is_too_small_is_an_error() -> None:
    with pytest.raises(ConfigError, match="fewer than 4"):
        planned(replace(ROOMY, num_nodes=1))
