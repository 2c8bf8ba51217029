"""The learning rate's factor: in bounds, without jumps, 1 after the warmup, `min_factor` at the end."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amalthea.optim.config import ScheduleConfig
from amalthea.optim.schedule import lr_factor


def factors(total: int, **changes: Any) -> list[float]:
    config = ScheduleConfig(**changes)
    return [lr_factor(config, step=step, total_steps=total) for step in range(total)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"kind": "wsd", "warmup_steps": 2, "decay_fraction": 0.4, "min_factor": 0.2},
            [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2],
        ),
        ({"kind": "wsd", "decay_fraction": 0.5, "min_factor": 0.0}, [1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0]),
        ({"kind": "wsd", "decay_fraction": 0.0, "min_factor": 0.2}, [1] * 10),
        (
            {"kind": "wsd", "warmup_steps": 8, "decay_fraction": 0.4, "min_factor": 0.5},
            [i / 8 for i in range(1, 9)] + [0.75, 0.5],
        ),
        ({"kind": "constant", "warmup_steps": 4, "min_factor": 0.2}, [0.25, 0.5, 0.75] + [1] * 7),
        (
            {"kind": "cosine", "warmup_steps": 6, "min_factor": 0.2},
            [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1]
            + [0.2 + 0.8 * (1 + math.cos(math.pi * i / 4)) / 2 for i in (1, 2, 3, 4)],
        ),
        ({"kind": "cosine", "warmup_steps": 10, "min_factor": 0.2}, [i / 10 for i in range(1, 11)]),
    ],
)
def test_factors_of_ten_steps(changes: dict[str, Any], expected: list[float]) -> None:
    assert factors(10, **changes) == pytest.approx(expected, abs=1e-12)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[ScheduleConfig, int]:
    total = draw(st.integers(1, 200))
    config = ScheduleConfig(
        kind=draw(st.sampled_from(["wsd", "cosine", "constant"])),
        warmup_steps=draw(st.integers(0, total)),
        decay_fraction=draw(st.floats(0, 1)),
        min_factor=draw(st.floats(0, 1)),
    )
    return config, total


@given(schedule=schedules())
@settings(max_examples=200, deadline=None)
def test_any_schedule(schedule: tuple[ScheduleConfig, int]) -> None:
    config, total = schedule
    values = [lr_factor(config, step=step, total_steps=total) for step in range(total)]
    warmup, rest = values[: config.warmup_steps], values[config.warmup_steps :]
    assert warmup == [(step + 1) / config.warmup_steps for step in range(len(warmup))]
    assert all(config.min_factor - 1e-12 <= value <= 1 for value in rest)
    assert all(after <= before for before, after in pairwise(rest)), "it never rises again"

    decay_steps = len(rest)
    if config.kind == "wsd":
        decay_steps = min(decay_steps, round(config.decay_fraction * total))
    if config.kind == "constant":
        decay_steps = 0
    assert rest[: len(rest) - decay_steps] == [1.0] * (len(rest) - decay_steps)
    if decay_steps:
        assert values[-1] == pytest.approx(config.min_factor, abs=1e-12)
        steepest = (1 - config.min_factor) / decay_steps * (math.pi / 2 if config.kind == "cosine" else 1)
        falls = [before - after for before, after in pairwise([1.0, *rest])]
        assert max(falls) <= steepest + 1e-9, "no jump"


@given(schedule=schedules(), beyond=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_after_the_last_step_it_stays(schedule: tuple[ScheduleConfig, int], beyond: int) -> None:
    config, total = schedule
    if config.kind == "cosine" and config.warmup_steps < total:
        assert lr_factor(config, step=total + beyond, total_steps=total) == pytest.approx(config.min_factor, abs=1e-12)
    assert 0 <= lr_factor(config, step=total + beyond, total_steps=total) <= 1
