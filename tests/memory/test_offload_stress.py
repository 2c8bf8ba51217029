"""Boundaries that travel late, over poisoned buffers, leave losses and gradients as they are, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import SEQ_LEN, microbatches, tiny_config

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import TrainingError
from amalthea.core.tensors import local_tensor
from amalthea.core.world import World
from amalthea.memory import offload
from amalthea.memory.copies import Copies
from amalthea.memory.offload import BoundaryOffload
from amalthea.train.build import build
from amalthea.train.step import train_step

from .stressed import ForgetsToWait, StressedCopies

LAYERS = 6
PER_RANK = 4
"""Microbatches: 4, 2 or 1 accumulation steps of 1, 2 or 4 sequences under one gather."""
BLOCKS, PASSES = (1, 2, 3), (1, 2, 4)
MESHES: dict[str, tuple[int, dict[str, Any], tuple[tuple[int, int], ...]]] = {
    "1 rank": (1, {}, tuple((blocks, passes) for blocks in BLOCKS for passes in PASSES)),
    "2 ranks": (2, {}, ((1, 2), (2, 4), (3, 1))),
    "4 ranks": (4, {}, ((1, 4), (3, 2))),
    "ep2-fsdp2": (4, {"parallel__ep": 2}, ((1, 2), (2, 4))),
}


def config_of(num_ranks: int, blocks: int, passes: int, **memory: Any) -> RunConfig:
    return tiny_config(
        model__num_layers=LAYERS,
        train__microbatch_sequences=1,
        train__global_batch_tokens=SEQ_LEN * PER_RANK * num_ranks,
        memory__blocks_per_group=blocks,
        memory__sequences_per_gather=passes,
        **memory,
    )


def two_steps(
    world: World, config: RunConfig, copies: Copies | None
) -> tuple[list[float], dict[str, torch.Tensor]] | None:
    """Losses and norms of two steps, and this rank's gradients of the second; none where they are not finite."""
    run = build(config, resolve(config, world_size=world.size), world, copies=copies)
    figures: list[float] = []
    try:
        for step in range(2):
            if step == 1:
                run.optimizers.zero_grad = lambda: None  # type: ignore[method-assign]
            result = train_step(run, microbatches(run, step), lr_factor=1.0, tallies=())
            figures += [result.loss, result.grad_norm]
    except TrainingError:
        return None
    grads = {name: p.grad for name, p in run.model.named_parameters()}
    return figures, {name: local_tensor(grad).clone() for name, grad in grads.items() if grad is not None}


def campaign(world: World, cases: tuple[tuple[int, int], ...], parallel: dict[str, Any]) -> list[tuple[int, bool]]:
    """For each case, how many copies were made and whether the run was the same."""
    plain = {p: two_steps(world, config_of(world.size, 1, p, **parallel), None) for p in {p for _, p in cases}}
    found = []
    for blocks, passes in cases:
        latest = (blocks + passes) % 2 == 1
        seed = 100 * blocks + 10 * passes + world.rank
        copies = StressedCopies(seed=seed, max_delay_s=None if latest else 0.002)
        settings = {"memory__recompute": "block", "memory__offload": True, **parallel}
        late = two_steps(world, config_of(world.size, blocks, passes, **settings), copies)
        copies.close()
        found.append((copies.num_copies, same(late, plain[passes])))
    return found


def same(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return False
    return left[0] == right[0] and all(torch.equal(left[1][name], right[1][name]) for name in right[1])


@pytest.mark.case(16)
@pytest.mark.parametrize("mesh", MESHES)
def test_late_copies_over_poisoned_buffers_change_nothing(mesh: str) -> None:
    num_ranks, parallel, cases = MESHES[mesh]
    for found in run_ranks(num_ranks, campaign, cases, parallel):
        travelling = [2 * PER_RANK * (-(-LAYERS // blocks) - 1) for blocks, _ in cases]
        # Each boundary out and back, in two steps.
        assert found == [(2 * boundaries, True) for boundaries in travelling]


class DropsItsSource(BoundaryOffload):
    """Lets a boundary go without waiting for its copy out."""

    def _release(self, boundary: offload._Boundary) -> None:
        boundary.source = None


class OneLanding(BoundaryOffload):
    """Prefetches into the landing that backward is reading."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._landings[1] = self._landings[0]


class AsksAfterUse(BoundaryOffload):
    """Prefetches two boundaries ahead, before the landing is free."""

    def _unpack(self, packed: Any) -> torch.Tensor:
        found = super()._unpack(packed)
        if len(self._away) > 1:
            self._bring(self._away[-2])
        return found


MUTANTS: dict[str, type[BoundaryOffload] | str] = {
    "drops its source": DropsItsSource,
    "one landing": OneLanding,
    "prefetches too early": AsksAfterUse,
    "no wait for copies out": "to_host",
    "no wait for copies back": "to_device",
}


def mutated(world: World, name: str) -> bool:
    """Whether the mutant's run was the same as a plain one."""
    settings = {"memory__recompute": "block", "memory__offload": True}
    plain = two_steps(world, config_of(1, 2, 2), None)
    mutant = MUTANTS[name]
    copies = ForgetsToWait(lane=mutant) if isinstance(mutant, str) else StressedCopies(seed=0, max_delay_s=None)
    with pytest.MonkeyPatch.context() as patch:
        if not isinstance(mutant, str):
            patch.setattr(offload, "BoundaryOffload", mutant)
        late = two_steps(world, config_of(1, 2, 2, **settings), copies)
    copies.close()
    return same(late, plain)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_in_the_engine_is_seen(mutant: str) -> None:
    assert run_ranks(1, mutated, mutant) == [False]
