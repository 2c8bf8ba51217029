"""Optimizer state in host memory: the same steps and the same checkpoints, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import Outcome, resumed, same, steps, tiny_config, uninterrupted, whole_state

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError, TrainingError
from amalthea.core.world import World
from amalthea.memory.copies import Copies, DirectCopies, Ticket
from amalthea.memory.state import HostState
from amalthea.optim import resting
from amalthea.train.build import build

from .stressed import ForgetsToWait, StressedCopies

CPU = torch.device("cpu")
MUON: dict[str, Any] = {"optim__experts": "muon", "optim__matrices": "muon"}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw": (1, {}),
    "muon": (1, MUON),
    "muon, 2 ranks": (2, MUON),
    "muon, hsdp-ep2": (4, {**MUON, "parallel__dp_replicate": 2, "parallel__ep": 2}),
}


def config_of(parallel: dict[str, Any], *, offload: bool) -> RunConfig:
    return tiny_config(memory__offload_optimizer=offload, **parallel)


def three_steps(world: World, config: RunConfig, engine: str | None) -> Outcome:
    """Norms and weights; AdamW's buckets are small, so that several travel."""
    copies: Copies | None = None
    if engine is not None:
        copies = (
            ForgetsToWait(lane=engine)
            if engine in ("to_host", "to_device")
            else StressedCopies(seed=world.rank, max_delay_s=None if engine == "latest" else 0.002)
        )
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resting, "BUCKET_ELEMENTS", 2000)
            run = build(config, resolve(config, world_size=world.size), world, copies=copies)
        norms = steps(run, range(3))
    finally:
        if isinstance(copies, StressedCopies):
            copies.close()
            assert copies.num_copies >= 3 * 2 * 2
    return norms, whole_state(run)


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_are_the_same_bit_for_bit(mesh: str) -> None:
    num_ranks, parallel = MESHES[mesh]
    plain = run_ranks(num_ranks, three_steps, config_of(parallel, offload=False), None)[0]
    for engine in (None, "random", "latest"):
        assert same(run_ranks(num_ranks, three_steps, config_of(parallel, offload=True), engine)[0], plain), engine


@pytest.mark.parametrize("forgotten", ["to_host", "to_device"])
def test_a_missing_wait_is_seen(forgotten: str) -> None:
    plain = run_ranks(1, three_steps, config_of({}, offload=False), None)[0]
    late = run_ranks(1, outcome_of_mistake, config_of({}, offload=True), forgotten)[0]
    assert late is None or not same(late, plain)


def outcome_of_mistake(world: World, config: RunConfig, forgotten: str) -> Outcome | None:
    try:
        return three_steps(world, config, forgotten)
    except TrainingError:  # not finite
        return None


@pytest.mark.parametrize("mesh", ["adamw", "muon, 2 ranks"])
def test_state_survives_a_checkpoint_with_and_without_offload(mesh: str, tmp_path: Path) -> None:
    num_ranks, parallel = MESHES[mesh]
    plain = run_ranks(num_ranks, uninterrupted, config_of(parallel, offload=False))[0]
    for offloads in ((True, True), (True, False), (False, True)):
        folder = str(tmp_path / f"{offloads}")
        before, after = (config_of(parallel, offload=offload) for offload in offloads)
        assert same(run_ranks(num_ranks, resumed, folder, before, after)[0], plain), offloads


class Noted(DirectCopies):
    """Writes down the order of copies by the size of what travels."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        self.log.append(f"back {source.numel()}")
        return super().to_host(source, target)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        self.log.append(f"come {source.numel()}")
        return super().to_device(source, target)


def test_from_the_second_step_on_a_batch_comes_while_the_one_before_is_at_work() -> None:
    copies = Noted()
    state = HostState(copies, device=CPU, host_bytes=1000)
    batches = [state.zeros([torch.Size([size])], torch.float32) for size in (1, 2, 3)]

    def step() -> list[str]:
        copies.log.clear()
        for batch in batches:
            with state.at_hand(batch) as ((tensor,),):
                copies.log.append("work")
                tensor += 1
        return copies.log

    assert step() == ["come 1", "work", "back 1", "come 2", "work", "back 2", "come 3", "work", "back 3"]
    assert step() == ["come 1", "come 2", "work", "back 1", "come 3", "work", "back 2", "work", "back 3"]
    assert [batch.tensors[0].tolist() for batch in batches] == [[2.0], [2.0, 2.0], [2.0, 2.0, 2.0]]


def test_more_than_the_host_has_is_refused() -> None:
    state = HostState(DirectCopies(), device=CPU, host_bytes=1024)
    state.zeros([torch.Size([16, 16])], torch.float32)
    with pytest.raises(ConfigError, match=r"offload_optimizer needs 1\.0 KiB .* and 1\.0 KiB is free"):
        state.zeros([torch.Size([1])], torch.float32)
