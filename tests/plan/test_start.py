"""A step that does not fit is refused before anything is built, on the arithmetic of the plan."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import tiny_config

from amalthea.config.check import resolve
from amalthea.config.overrides import apply_overrides
from amalthea.core.units import GIB
from amalthea.plan.fits import check_fits, memory_floor
from amalthea.plan.setting import Code
from amalthea.plan.start import Room, refusal
from amalthea.train.build import build
from amalthea.train.step import train_step

CODE = Code(build, train_step)
PLENTY = 1 << 50
DEEP = {"model__num_layers": 16}


def said(room: Room, world_size: int = 1, **overrides: Any) -> str | None:
    return refusal(tiny_config(**overrides), room, CODE, world_size=world_size, node_ranks=world_size)


def between(world_size: int, *, is_gpu: bool, **overrides: Any) -> Room:
    """More than the lower bound, less than the step."""
    config = tiny_config(**overrides)
    resolved = resolve(config, world_size=world_size)
    bound = memory_floor(config, resolved).device
    room = int(bound * 1.6)
    assert check_fits(config, resolved, room, PLENTY) is None
    return Room(room, PLENTY, is_gpu=is_gpu)


@pytest.mark.parametrize("is_gpu", [False, True])
def test_a_step_that_fits_is_let_pass(is_gpu: bool) -> None:
    assert said(Room(GIB, GIB, is_gpu=is_gpu)) is None
    assert said(Room(GIB, GIB, is_gpu=is_gpu), 4, parallel__ep=2, precision="bf16") is None


@pytest.mark.case(11)
@pytest.mark.parametrize("world_size", [1, 4])
def test_what_the_bound_lets_pass_is_refused_by_the_step(world_size: int) -> None:
    line = said(between(world_size, is_gpu=False, **DEEP), world_size, **DEEP)
    assert line is not None
    assert "memory runs out in backward" in line
    assert "; would fit: memory.recompute=block" in line
    changed = DEEP | {"memory__recompute": "block"}
    assert said(between(world_size, is_gpu=False, **DEEP), world_size, **changed) is None


@pytest.mark.case(11)
def test_a_gpus_allocator_is_replayed_and_what_would_fit_does() -> None:
    big = {"precision": "bf16", "model__num_layers": 8, "train__microbatch_sequences": 8, "model__loss_chunk_tokens": 8}
    needed = None
    for mib in range(2, 40):
        line = said(Room(mib << 20, PLENTY, is_gpu=True), **big)
        if line is None:
            break
        needed = line
    assert needed is not None
    assert "memory runs out in backward" in needed or "memory runs out in forward" in needed
    proposed = needed.rpartition("would fit: ")[2].split(", or ")[0].split(" ")
    changed = apply_overrides(tiny_config(**big), proposed)
    room = Room((mib - 1) << 20, PLENTY, is_gpu=True)
    assert refusal(changed, room, CODE, world_size=1, node_ranks=1) is None
