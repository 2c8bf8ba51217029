"""A run that cannot fit is refused at once, in one line."""

from __future__ import annotations

import pytest
from support.tiny import tiny_config

from amalthea.config.check import resolve
from amalthea.core.errors import ConfigError
from amalthea.core.world import World
from amalthea.launch.train import check_memory, check_step, expand_segments
from amalthea.memory import offload
from amalthea.plan.fits import memory_floor
from amalthea.recipes.europa_1t import europa_1t


@pytest.mark.case(11)
def test_the_reference_model_on_one_machine_is_refused_before_anything_is_made() -> None:
    config = europa_1t()
    with pytest.raises(ConfigError, match=r"needs at least .* of device memory on a rank.*; most is "):
        check_memory(config, resolve(config, world_size=1536), World(size=1536, local_size=4096))


def test_a_small_run_fits() -> None:
    config = tiny_config()
    check_memory(config, resolve(config, world_size=1), World())


@pytest.mark.case(11)
def test_a_step_beyond_memory_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bound lets pass: by the plan of the step, in a process of its own."""
    config = tiny_config(model__num_layers=16)
    room = int(1.6 * memory_floor(config, resolve(config, world_size=1)).device)
    monkeypatch.setattr(offload, "host_bytes_of_rank", lambda world: room)
    check_memory(config, resolve(config, world_size=1), World())
    with pytest.raises(ConfigError, match=r"does not fit: memory runs out in .* would fit: memory.recompute=block"):
        check_step(config, World())
    check_step(tiny_config(memory__plan_at_start=False), World())
    monkeypatch.setattr(offload, "host_bytes_of_rank", lambda world: 2 * room)
    said: list[str] = []
    check_step(config, World(), say=said.append)
    assert said == ["planning memory"]


def test_a_small_share_of_the_host_is_not_planned() -> None:
    said: list[str] = []
    check_step(tiny_config(), World(), say=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("environ", "setting"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_segments_grow_unless_the_user_says_otherwise(environ: dict[str, str], setting: str) -> None:
    before = dict(environ)
    assert expand_segments(environ) == setting
    assert environ == (before or {"PYTORCH_ALLOC_CONF": setting})
    assert expand_segments(environ) == setting  # asked again, as the manifest does
