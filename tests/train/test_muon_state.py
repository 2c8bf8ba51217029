"""Muon's momentum in checkpoints: by name, bit for bit under any mesh, and held once where replicas own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import microbatches, tiny_config, whole_state

from amalthea.checkpoint import store
from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.pieces import Pieces
from amalthea.core.world import World
from amalthea.train.build import Run, build
from amalthea.train.step import train_step

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "fsdp2": (2, {}),
    "fsdp4": (4, {}),
    "ep2-fsdp2": (4, {"parallel__ep": 2}),
    "hsdp-owning": (4, {"parallel__dp_replicate": 2}),
    "hsdp-repeated": (4, {"parallel__dp_replicate": 2, "optim__replicas": "repeated"}),
}


def config_of(mesh: str, **overrides: Any) -> tuple[int, RunConfig]:
    num_ranks, of_mesh = MESHES[mesh]
    return num_ranks, tiny_config(optim__experts="muon", optim__matrices="muon", **of_mesh | overrides)


@dataclass(frozen=True)
class State:
    """What a rank holds: whole weights, blocks of momentum by name, and the loss of the step that follows."""

    weights: dict[str, torch.Tensor]
    blocks: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]
    shapes: dict[str, torch.Size]
    next_loss: float

    @property
    def num_elements(self) -> int:
        return sum(tensor.numel() for blocks in self.blocks.values() for _, tensor in blocks)


def state_of(run: Run, step: int) -> State:
    """Before the step that gives its loss."""
    pieces = {name: tensor for name, tensor in run.named_tensors().items() if isinstance(tensor, Pieces)}
    blocks = {name: [(piece.offsets, piece.tensor.clone()) for piece in held.pieces] for name, held in pieces.items()}
    shapes = {name: held.shape for name, held in pieces.items()}
    weights = whole_state(run)
    loss = train_step(run, microbatches(run, step), lr_factor=1.0, tallies=()).loss
    return State(weights, blocks, shapes, loss)


def train_and_save(world: World, config: RunConfig, run_dir: Path, num_steps: int) -> State:
    run = build(config, resolve(config, world_size=world.size), world)
    for step in range(num_steps):
        train_step(run, microbatches(run, step), lr_factor=1.0, tallies=())
    store.save(run_dir, step=num_steps, tensors=run.named_tensors(), progress={}, world=world, keep=1)
    return state_of(run, num_steps)


def load(world: World, config: RunConfig, run_dir: Path, num_steps: int) -> State:
    """Into a run of other weights and no momentum."""
    other = config.model_copy(update={"seed": config.seed + 1})
    run = build(other, resolve(other, world_size=world.size), world)
    path = store.find_newest(run_dir).path
    assert path is not None
    store.load(path, run.named_tensors())
    return state_of(run, num_steps)


def whole_momenta(states: list[State]) -> dict[str, torch.Tensor]:
    """Puts the ranks' blocks together; where two ranks hold the same block, it must be the same."""
    momenta = {name: torch.full(shape, torch.nan) for name, shape in states[0].shapes.items()}
    for state in states:
        for name, blocks in state.blocks.items():
            for offsets, block in blocks:
                target = momenta[name][tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))]
                assert target.isnan().all() or torch.equal(target, block.float()), name
                target.copy_(block)
    return momenta


def check_same(before: list[State], after: list[State]) -> None:
    expected, got = whole_momenta(before), whole_momenta(after)
    assert got.keys() == expected.keys()
    assert all(value.isfinite().all() and value.any() for value in expected.values()), "two steps moved all of them"
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []
    weights = before[0].weights
    assert [n for state in after for n in weights if not torch.equal(state.weights[n], weights[n])] == []
    assert after[0].next_loss == pytest.approx(before[0].next_loss, abs=1e-5)


@pytest.mark.case(2)
@pytest.mark.parametrize("source", ["fsdp4", "ep2-fsdp2", "hsdp-owning", "hsdp-repeated"])
def test_momentum_comes_back_bit_for_bit_on_every_mesh(tmp_path: Path, source: str) -> None:
    num_ranks, config = config_of(source)
    before = run_ranks(num_ranks, train_and_save, config, tmp_path, 2)
    for target in MESHES:
        num_ranks, config = config_of(target)
        check_same(before, run_ranks(num_ranks, load, config, tmp_path, 2))


@pytest.mark.case(2)
@pytest.mark.case(5)
@pytest.mark.parametrize(
    "overrides",
    [
        {"optim__muon__momentum_dtype": "bf16"},
        {"optim__muon__per_head": True},
        {"model__moe__num_experts": 2},
        {"model__num_heads": 3, "model__num_kv_heads": 1, "model__head_dim": 6},
    ],
    ids=["bf16", "per_head", "2-experts", "uneven"],
)
def test_other_layouts_of_momentum_come_back_as_well(tmp_path: Path, overrides: dict[str, Any]) -> None:
    """Uneven: 18 rows of queries and 6 of keys over four ranks, of which the last then has none."""
    num_ranks, config = config_of("fsdp4", **overrides)
    before = run_ranks(num_ranks, train_and_save, config, tmp_path, 2)
    for target in ("fsdp4", "fsdp2", "hsdp-owning"):
        num_ranks, config = config_of(target, **overrides)
        check_same(before, run_ranks(num_ranks, load, config, tmp_path, 2))


def test_momentum_of_one_rank_loads_on_three_and_of_three_on_four(tmp_path: Path) -> None:
    """Nothing divides evenly by three: 8 experts, 32 and 16 rows."""
    sequences = {"train__global_batch_tokens": 12 * 32}
    three = tiny_config(optim__experts="muon", optim__matrices="muon", **sequences)
    num_ranks, one = config_of("1", **sequences)
    before = run_ranks(num_ranks, train_and_save, one, tmp_path / "one", 2)
    check_same(before, run_ranks(3, load, three, tmp_path / "one", 2))
    before = run_ranks(3, train_and_save, three, tmp_path / "three", 2)
    num_ranks, four = config_of("hsdp-owning", **sequences)
    check_same(before, run_ranks(num_ranks, load, four, tmp_path / "three", 2))


def test_owning_replicas_hold_each_momentum_once(tmp_path: Path) -> None:
    by_mesh = {}
    for mesh in ("fsdp4", "hsdp-owning", "hsdp-repeated"):
        num_ranks, config = config_of(mesh)
        by_mesh[mesh] = run_ranks(num_ranks, train_and_save, config, tmp_path / mesh, 1)
    total = sum(shape.numel() for shape in by_mesh["fsdp4"][0].shapes.values())
    held = {mesh: [state.num_elements for state in states] for mesh, states in by_mesh.items()}
    assert sum(held["fsdp4"]) == sum(held["hsdp-owning"]) == total
    assert held["hsdp-repeated"] == [total // 2] * 4
    # About a half of what a repeating replica's rank holds: no more than one unit's share off.
    assert max(held["hsdp-owning"]) <= 1.1 * total / 4
