"""What a run's checkpoints hold: everything that the run held, by name, for any mesh to take up."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import run_ranks
from support.runs import (
    Places,
    WholeRun,
    checkpoint_steps,
    final_state,
    losses,
    other_bits,
    read_checkpoint,
    run_config,
    run_inside,
)
from torch.distributed.tensor import DTensor

from amalthea.checkpoint import store
from amalthea.checkpoint.agree import gather
from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.pieces import Pieces
from amalthea.core.world import World
from amalthea.train import loop
from amalthea.train.build import Run, build

EP4 = {"parallel__ep": 4}
HSDP = {"parallel__dp_replicate": 2, "parallel__ep": 2}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of a run on any mesh as one process would hold it; a place that nobody holds is NaN."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if not isinstance(tensor, Pieces):
        return tensor.clone()
    joined = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
    for pieces in gather([(piece.offsets, piece.tensor) for piece in tensor.pieces]):
        for offsets, block in pieces:
            joined[tuple(slice(at, at + size) for at, size in zip(offsets, block.shape, strict=True))] = block
    return joined


def train_and_tell(world: World, config: RunConfig, run_dir: Path, cache: Path) -> dict[str, torch.Tensor]:
    """Trains, and returns what the run held in memory at its end (on rank 0)."""
    runs: list[Run] = []

    def build_and_keep(*arguments: Any) -> Run:
        runs.append(build(*arguments))
        return runs[-1]

    with mock.patch.object(loop, "build", build_and_keep):
        assert run_inside(world, config, run_dir, cache) == 0
    held = {name: whole(tensor.detach()) for name, tensor in runs[0].named_tensors().items()}
    return held if world.is_main else {}


def hand_over(world: World, config: RunConfig, source: Path, run_dir: Path) -> None:
    """Builds the run of another mesh, loads a checkpoint into it, and saves it again."""
    run = build(config, resolve(config, world_size=world.size), world)
    step = store.load(source, run.named_tensors())["step"]
    store.save(run_dir, step=step, tensors=run.named_tensors(), progress={"step": step}, world=world, keep=9)


@pytest.mark.case(1)
@pytest.mark.case(3)
@pytest.mark.parametrize("mesh", [EP4, HSDP], ids=["ep4", "hsdp-ep2"])
def test_the_last_checkpoint_is_what_the_run_held(mesh: dict[str, Any], places: Places, tmp_path: Path) -> None:
    config = run_config(places.corpus, train__steps=4, train__validate_every_steps=None, **mesh)
    held = run_ranks(4, train_and_tell, config, tmp_path, places.cache)[0]
    saved = final_state(tmp_path)
    assert other_bits(saved, held) == []
    biases = [name for name in saved if name.endswith("router.bias")]
    assert biases == ["model.blocks.0.moe.router.bias", "model.blocks.1.moe.router.bias"]
    for name in biases:
        assert saved[name].count_nonzero() > 0, "balancing has moved it"
        # Four updates by ±0.01 (or 0), once per step however many microbatches there are.
        assert torch.allclose(saved[name], (saved[name] / 0.01).round() * 0.01, atol=1e-6)
        assert saved[name].abs().max() <= 0.04 + 1e-6


@pytest.mark.case(1)
@pytest.mark.case(2)
def test_every_mesh_takes_up_what_another_saved(places: Places, whole_run: WholeRun, tmp_path: Path) -> None:
    """Expert parallelism over 4, 2 and 1 ranks, then owning replicas, then repeated ones: not a bit is lost."""
    source = whole_run(4, **EP4) / "checkpoints" / "step_8"
    first = read_checkpoint(source)
    ways: list[tuple[int, dict[str, Any]]] = [
        (2, {"parallel__ep": 2}),
        (1, {}),
        (4, HSDP | {"optim__replicas": "owning"}),
        (4, HSDP | {"optim__replicas": "repeated"}),
        (4, EP4),
    ]
    for number, (ranks, mesh) in enumerate(ways):
        folder = tmp_path / str(number)
        run_ranks(ranks, hand_over, run_config(places.corpus, **mesh), source, folder)
        source = folder / "checkpoints" / "step_8"
        assert other_bits(read_checkpoint(source), first) == [], f"{ranks} ranks, {mesh}"


@pytest.mark.case(2)
def test_each_step_has_its_own_folder_with_momentum_by_parameter(whole_run: WholeRun) -> None:
    run_dir = whole_run(4, **EP4)
    assert checkpoint_steps(run_dir) == [3, 6, 8]
    third, sixth = (read_checkpoint(run_dir / "checkpoints" / f"step_{step}") for step in (3, 6))
    assert third.keys() == sixth.keys()
    momenta = {name for name in third if name.endswith(".momentum")}
    matrices = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "moe.shared.w_gate", "moe.shared.w_up", "moe.shared.w_down")
    assert momenta == {
        *(f"optim.blocks.{i}.{name}.weight.momentum" for i in (0, 1) for name in matrices),
        *(f"optim.blocks.{i}.moe.experts.{name}.momentum" for i in (0, 1) for name in ("w_gate", "w_up", "w_down")),
    }
    for name in momenta:
        assert third[name].shape == third[name.replace("optim.", "model.").removesuffix(".momentum")].shape
        assert third[name].isfinite().all()
        assert not torch.equal(third[name], sixth[name])


def test_replicas_may_own_or_repeat_after_a_resume(places: Places, whole_run: WholeRun, tmp_path: Path) -> None:
    """Who computes an update is no property of the run, so a resumed run may choose again."""
    for steps, replicas in ((4, "owning"), (6, "repeated")):
        config = run_config(places.corpus, train__steps=steps, optim__replicas=replicas, **HSDP)
        assert run_ranks(4, run_inside, config, tmp_path, places.cache) == [0] * 4
    assert checkpoint_steps(tmp_path) == [3, 4, 6]
    assert len(losses(tmp_path)) == 6
