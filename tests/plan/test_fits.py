"""The lower bound of memory: against mental arithmetic, against a traced step, and what a refusal says."""

from __future__ import annotations

import pytest
from support.tiny import SEQ_LEN, SEQUENCES, tiny_config

from amalthea.config.check import resolve
from amalthea.config.overrides import apply_overrides
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.units import GIB
from amalthea.plan.accounting import account
from amalthea.plan.allocator import AllocatorSettings, replay
from amalthea.plan.fits import check_fits, memory_floor, remedies_that_fit
from amalthea.plan.trace import trace_step
from amalthea.recipes.europa_1t import europa_1t
from amalthea.train.build import build
from amalthea.train.step import train_step

PLENTY = 1 << 60


def refusal(config: RunConfig, device_bytes: int, host_bytes: int = PLENTY, *, world_size: int) -> str:
    with pytest.raises(ConfigError) as caught:
        check_fits(config, resolve(config, world_size=world_size), device_bytes, host_bytes)
    return str(caught.value)


def test_the_reference_model_by_mental_arithmetic() -> None:
    config = europa_1t()
    floor = memory_floor(config, resolve(config, world_size=1536))
    per_rank = account(config.model, seq_len=65_536).total_params * 4 // 384
    assert floor.parameters == floor.gradients == per_rank
    # 65,536 tokens of 6,144 numbers in bf16, 74 of them, all but the last on the host.
    assert (floor.boundaries, floor.host) == (65_536 * 6144 * 2, 73 * 65_536 * 6144 * 2)
    assert check_fits(config, resolve(config, world_size=1536), 91 * GIB, 102 * 10**9) is None


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"memory__recompute": "block"},
        {"memory__recompute": "block", "parallel__ep": 2},
        {"precision": "bf16", "memory__recompute": "block", "memory__offload": True},
    ],
)
def test_no_traced_step_takes_less(overrides: dict[str, object]) -> None:
    config = tiny_config(optim__experts="muon", **overrides)
    trace = trace_step(config, rank=0, world_size=4, build=build, train_step=train_step)
    peak = replay(trace, settings=AllocatorSettings()).demand.peak_allocated.allocated_bytes
    floor = memory_floor(config, resolve(config, world_size=4))
    assert 0.2 * peak < floor.device <= peak


@pytest.mark.case(11)
def test_a_refusal_names_the_largest_class_and_what_would_fit() -> None:
    config = apply_overrides(europa_1t(), ["memory.offload=false"])
    line = refusal(config, 80 * GIB, world_size=1536)
    assert "most is boundaries, 55.5 GiB" in line
    assert "would fit: memory.offload=true memory.recompute=block, or" in line
    assert "\n" not in line


def test_what_it_proposes_does_fit() -> None:
    config = apply_overrides(europa_1t(), ["memory.offload=false"])
    resolved = resolve(config, world_size=1536)
    proposed = remedies_that_fit(config, resolved, 80 * GIB, PLENTY)
    assert 1 <= len(proposed) <= 3
    for overrides in proposed:
        changed = apply_overrides(config, overrides)
        assert check_fits(changed, resolve(changed, world_size=1536), 80 * GIB, PLENTY) is None


def test_host_memory_is_a_bound_too() -> None:
    line = refusal(europa_1t(), PLENTY, 10 * GIB, world_size=1536)
    assert "at least 54.8 GiB of host memory on a rank, which has 10.0 GiB" in line


def test_where_nothing_helps_it_says_how_many_times_the_machine() -> None:
    config = tiny_config(train__global_batch_tokens=SEQ_LEN * SEQUENCES)
    line = refusal(config, 1000, world_size=1)
    assert "no memory setting is enough" in line
    assert "times as many GPUs" in line


def test_what_goes_with_a_pass_is_less_where_ranks_share_sequences() -> None:
    config = europa_1t()
    resolved = resolve(config, world_size=1536)
    room = memory_floor(config, resolved).device + 20 * GIB
    first = remedies_that_fit(config, resolved, room, PLENTY, pass_bytes=38 * GIB)[0]
    assert first == ("parallel.cp=2", "parallel.dp_shard=auto", "memory.sequences_per_gather=2")


def test_parameters_go_to_the_host_where_nothing_else_helps() -> None:
    config = tiny_config(
        precision="bf16", model__num_layers=24, memory__recompute="block", train__global_batch_tokens=SEQ_LEN
    )
    resolved = resolve(config, world_size=1)
    everything = ["memory.offload_parameters=true", "memory.offload_optimizer=true", "memory.offload=true"]
    room = memory_floor(apply_overrides(config, everything), resolved).device
    line = refusal(config, room, world_size=1)
    assert "would fit: memory.offload=true memory.recompute=block memory.offload_optimizer=true" in line
    assert line.endswith("memory.offload_parameters=true")
    assert "of host memory" in refusal(apply_overrides(config, everything), room, 1000, world_size=1)
