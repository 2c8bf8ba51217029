"""A line through two shallow traces against a deeper one, and what a trace costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.timelines import ROUND
from support.tiny import SEQ_LEN, tiny_config

from amalthea.config.run import RunConfig
from amalthea.plan.allocator import replay
from amalthea.plan.setting import Code, Setting
from amalthea.plan.sketch import sketch
from amalthea.plan.timeline import simulate
from amalthea.train.build import build
from amalthea.train.step import train_step

CODE = Code(build, train_step)
MACHINE = replace(ROUND, hbm_gb=1.0)


def wide(layers: int, num_gpus: int) -> RunConfig:
    """Tensors large enough that blocks' rounding does not matter."""
    return tiny_config(
        precision="bf16",
        model__num_layers=layers,
        model__hidden_size=256,
        model__head_dim=64,
        model__moe__expert_hidden_size=512,
        train__global_batch_tokens=4 * SEQ_LEN * num_gpus,
        train__microbatch_sequences=4,
        parallel__ep=2,
        memory__recompute="block",
        memory__unshard_async_op=True,
    )


def test_ten_layers_follow_from_four_and_six() -> None:
    setting, config = Setting(MACHINE, 8), wide(10, 8)
    drawn = sketch(config, setting, CODE)
    trace = setting.trace(config, CODE)
    memory, timeline = replay(trace, settings=setting.allocator).demand, simulate(trace, MACHINE)
    assert drawn.tokens == trace.tokens
    assert drawn.step_s == pytest.approx(timeline.step_s, rel=0.02)
    assert drawn.compute_s == pytest.approx(timeline.lanes["compute"].busy_s, rel=0.02)
    assert drawn.hfu == pytest.approx(timeline.hfu, rel=0.02)
    assert drawn.allocated_bytes == pytest.approx(memory.peak_allocated.allocated_bytes, rel=0.04)
    assert drawn.reserved_bytes == pytest.approx(memory.peak_reserved.reserved_bytes, rel=0.15)


def test_boundaries_over_the_hosts_budget_stay_on_the_device() -> None:
    config = wide(16, 8)
    boundary = 4 * SEQ_LEN * 256 * 2
    memory = {"offload": True, "offload_budget_gib": 12 * boundary / 1024**3}
    kept = config.model_copy(update={"memory": config.memory.model_copy(update=memory)})
    drawn = sketch(kept, Setting(MACHINE, 8), CODE)
    assert drawn.host_bytes == 12 * boundary
    # Three of fifteen that could travel, and what is there of those that do.
    assert 3 * boundary < drawn.by_class["boundaries"] <= 7 * boundary


def test_a_model_that_is_no_deeper_is_traced_whole() -> None:
    setting, config = Setting(MACHINE, 8), wide(2, 8)
    drawn, trace = sketch(config, setting, CODE), setting.trace(config, CODE)
    assert drawn.step_s == simulate(trace, MACHINE).step_s
    assert drawn.allocated_bytes == replay(trace, settings=setting.allocator).demand.peak_allocated.allocated_bytes


def test_the_work_of_a_trace_grows_with_layers_and_not_with_ranks() -> None:
    lengths = {
        (layers, gpus): len(Setting(MACHINE, gpus).trace(wide(layers, gpus), CODE).events)
        for layers, gpus in ((1, 8), (2, 8), (3, 8), (2, 512))
    }
    assert lengths[2, 8] - lengths[1, 8] == pytest.approx(lengths[3, 8] - lengths[2, 8], rel=0.05)
    assert lengths[2, 512] == pytest.approx(lengths[2, 8], rel=0.1)
