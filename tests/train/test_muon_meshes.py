"""Muon in a whole run: the same update, the same curve and the same replicas on every mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.collectives import Collectives
from support.muon import draw
from support.ranks import run_ranks
from support.tiny import SEQ_LEN, Curve, microbatches, tiny_config, whole_state
from torch.distributed.tensor import DTensor

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.world import World
from amalthea.parallel.shards import local_part
from amalthea.train.build import Run, build
from amalthea.train.step import train_step

SEQUENCES = 12
"""A step's, divisible by three ranks and by four."""
STEPS = 50
ACCUMULATING = ("hsdp2x2", "ep2-fsdp2", "3-ranks")
"""Take their share in microbatches of two or one in the fifty steps."""

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp4": (4, {}),
    "hsdp2x2": (4, {"parallel__dp_replicate": 2}),
    "hsdp2x2-repeated": (4, {"parallel__dp_replicate": 2, "optim__replicas": "repeated"}),
    "ep2-fsdp2": (4, {"parallel__ep": 2}),
    "ep4": (4, {"parallel__ep": 4}),
    "3-ranks": (3, {}),
    "2-experts": (4, {"model__moe__num_experts": 2}),
    "2-experts-ep2": (4, {"model__moe__num_experts": 2, "parallel__ep": 2}),
}


def muon_config(**overrides: Any) -> RunConfig:
    """Muon for experts and matrices."""
    values: dict[str, Any] = {
        "optim__experts": "muon",
        "optim__matrices": "muon",
        "train__global_batch_tokens": SEQUENCES * SEQ_LEN,
        "train__microbatch_sequences": SEQUENCES,
    }
    return tiny_config(**values | overrides)


def mesh_config(mesh: str, **overrides: Any) -> tuple[int, RunConfig]:
    num_ranks, of_mesh = MESHES[mesh]
    return num_ranks, muon_config(**of_mesh | overrides)


def single_config(mesh: str, **overrides: Any) -> RunConfig:
    """The same model on one rank."""
    of_model = {key: value for key, value in MESHES[mesh][1].items() if key.startswith("model")}
    return muon_config(**of_model | overrides)


_single: dict[str, Any] = {}


def on_one_rank(function: Any, config: RunConfig, *args: Any) -> Any:
    """What one rank gives, asked for once."""
    key = f"{function.__name__} {config.model_dump_json()} {args}"
    if key not in _single:
        _single[key] = run_ranks(1, function, config, *args)[0]
    return _single[key]


# Fifty steps


def learn_by_heart(world: World, config: RunConfig) -> Curve:
    """Fifty steps over three batches, again and again."""
    run = build(config, resolve(config, world_size=world.size), world)
    results = [train_step(run, microbatches(run, step % 3), lr_factor=1.0, tallies=()) for step in range(STEPS)]
    return Curve([r.loss for r in results], [r.grad_norm for r in results], [], whole_state(run))


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh != "2-experts-ep2"])
def test_fifty_steps_give_the_curve_of_one_rank(mesh: str) -> None:
    fast = {"model__num_layers": 1, "optim__muon__lr": 0.002, "optim__adamw__lr": 0.002}
    one: Curve = on_one_rank(learn_by_heart, single_config(mesh, **fast))
    share = {"train__microbatch_sequences": 2} if mesh in ACCUMULATING else {}
    num_ranks, config = mesh_config(mesh, **fast, **share)
    assert (resolve(config, world_size=num_ranks).accumulation_steps > 1) == (mesh in ACCUMULATING)
    curves: list[Curve] = run_ranks(num_ranks, learn_by_heart, config)
    assert curves[0].losses == pytest.approx(one.losses, abs=1e-3)
    assert one.losses[-1] < 0.95 * one.losses[0], "the run must have learned something"
    for name, value in curves[0].parameters.items():
        assert torch.equal(value, curves[-1].parameters[name]), f"{name} differs between ranks, or replicas"


# One step with given gradients


@dataclass(frozen=True)
class Step:
    """Whole weights before and after a step of learning rate 1 without decay, and what it sent."""

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    collectives: list[str]
    reducing: list[str]


def set_gaussian_grads(run: Run) -> None:
    """Every rank its part of Gaussian gradients; owning replicas get elements whose sum over replicas they are."""
    place = run.optimizers.place
    for name, parameter in run.model.named_parameters():
        grad = draw(name, parameter.shape)
        if place.owning:
            whose = torch.arange(grad.numel()).view(grad.shape) % place.grid.num_replicas
            grad = torch.where(whose == place.replica, grad, 0.0)
        part = local_part(name, parameter)
        for dim, (start, size) in enumerate(zip(part.offsets, part.tensor.shape, strict=True)):
            grad = grad.narrow(dim, start, size)
        grad = grad.clone(memory_format=torch.contiguous_format)
        if isinstance(parameter, DTensor):
            mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
            grad = DTensor.from_local(grad, mesh, placements, shape=shape, stride=parameter.stride())
        parameter.grad = grad


def take_step(world: World, config: RunConfig) -> Step:
    run = build(config, resolve(config, world_size=world.size), world)
    before = whole_state(run)
    set_gaussian_grads(run)
    with Collectives() as reducing:
        run.optimizers.reduce_over_replicas()
    with Collectives() as stepping:
        run.optimizers.step(lr_factor=1.0)
    return Step(before, whole_state(run), stepping.names, reducing.names)


def one_step_config(**overrides: Any) -> dict[str, Any]:
    return {
        "optim__muon": {"lr": 1.0, "weight_decay": 0.0, **overrides},
        "optim__adamw": {"lr": 1.0, "weight_decay": 0.0},
    }


@pytest.mark.parametrize("mesh", MESHES)
def test_an_update_is_that_of_one_rank_bit_for_bit(mesh: str) -> None:
    """All optimizers together, AdamW's share included."""
    one: Step = on_one_rank(take_step, single_config(mesh, **one_step_config()))
    num_ranks, config = mesh_config(mesh, **one_step_config())
    for step in run_ranks(num_ranks, take_step, config):
        assert step.after.keys() == one.after.keys()
        assert [name for name in one.after if not torch.equal(step.after[name], one.after[name])] == []


@pytest.mark.parametrize("mesh", ["hsdp2x2", "3-ranks"])
def test_an_update_by_heads_is_that_of_one_rank_and_another_than_of_whole_matrices(mesh: str) -> None:
    whole: Step = on_one_rank(take_step, single_config(mesh, **one_step_config()))
    one: Step = on_one_rank(take_step, single_config(mesh, **one_step_config(per_head=True)))
    num_ranks, config = mesh_config(mesh, **one_step_config(per_head=True))
    step: Step = run_ranks(num_ranks, take_step, config)[0]
    assert [name for name in one.after if not torch.equal(step.after[name], one.after[name])] == []
    changed = {name.split(".")[-2] for name in one.after if not torch.equal(whole.after[name], one.after[name])}
    assert changed == {"wq", "wk", "wv"}


def polar(matrices: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    return u @ vh


@pytest.mark.parametrize(("coefficients", "least"), [("quintic", 0.98), ("polar_express", 0.99)])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_matrix_moves_by_nearly_its_exact_polar_factor(mesh: str, coefficients: str, least: float) -> None:
    """Larger than the tiny model, since small Gaussians may have a singular value that five steps cannot lift."""
    wide = {
        "model__hidden_size": 96,
        "model__head_dim": 16,
        "model__moe__expert_hidden_size": 48,
        "model__num_layers": 1,
    }
    num_ranks, config = mesh_config(mesh, **one_step_config(coefficients=coefficients), **wide)
    step: Step = run_ranks(num_ranks, take_step, config)[0]
    matrices = [n for n, w in step.before.items() if w.ndim == 3 or ".attn.w" in n or ".shared." in n]
    assert len(matrices) == 4 + 3 + 3
    for name in matrices:
        # Momentum and Nesterov scale a first gradient, and the update is taken from the weights.
        rows, columns = step.before[name].shape[-2:]
        update = (step.before[name] - step.after[name]).view(-1, rows, columns).double()
        exact = polar(draw(name, step.before[name].shape)).view(-1, rows, columns)
        cosine = torch.cosine_similarity(update.flatten(1), exact.flatten(1))
        assert float(cosine.min()) >= least, name
        assert 0.15 < float(update.square().mean().sqrt()) < 0.23, f"{name}: AdamW's root mean square is about 0.2"


# What a step sends


def counts(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


@pytest.mark.parametrize("mesh", ["fsdp4", "ep2-fsdp2", "ep4", "3-ranks"])
def test_a_step_of_experts_starts_no_collective(mesh: str) -> None:
    num_ranks, config = mesh_config(mesh, optim__matrices="adamw")
    for step in run_ranks(num_ranks, take_step, config):
        assert step.collectives == step.reducing == []


@pytest.mark.parametrize(
    ("mesh", "stepping", "reducing"),
    [
        ("fsdp4", {"alltoall_base_": 2}, {}),
        ("2-experts", {"alltoall_base_": 2}, {}),
        ("hsdp2x2-repeated", {"alltoall_base_": 2}, {}),
        ("hsdp2x2", {"alltoall_base_": 2, "_allgather_base_": 1}, {"_reduce_scatter_base_": 1, "allreduce_": 1}),
    ],
)
def test_collectives_of_a_step(mesh: str, stepping: dict[str, int], reducing: dict[str, int]) -> None:
    num_ranks, config = mesh_config(mesh)
    for step in run_ranks(num_ranks, take_step, config):
        assert counts(step.collectives) == stepping
        assert counts(step.reducing) == reducing


# Accumulation


def grads_of(run: Run) -> dict[str, torch.Tensor]:
    grads = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    return {name: (g.to_local() if isinstance(g, DTensor) else g).clone() for name, g in grads.items()}


def grads_around_a_step(world: World, config: RunConfig) -> list[str]:
    """Names of gradients that the update changed, between the reduction and their being dropped."""
    run = build(config, resolve(config, world_size=world.size), world)
    before: dict[str, torch.Tensor] = {}
    changed: list[str] = []
    step, zero_grad = run.optimizers.step, run.optimizers.zero_grad

    def watched_step(**kwargs: Any) -> None:
        before.update(grads_of(run))
        step(**kwargs)

    def watched_zero_grad() -> None:
        after = grads_of(run)
        changed.extend(name for name in before if not torch.equal(before[name], after[name]))
        zero_grad()

    run.optimizers.step, run.optimizers.zero_grad = watched_step, watched_zero_grad  # type: ignore[method-assign]
    for number in range(2):
        train_step(run, microbatches(run, number), lr_factor=1.0, tallies=())
    assert len(before) == len(list(run.model.parameters()))
    return changed


@pytest.mark.parametrize("mesh", ["hsdp2x2", "ep2-fsdp2", "2-experts"])
def test_a_step_leaves_gradients_as_it_found_them(mesh: str) -> None:
    num_ranks, config = mesh_config(mesh, train__microbatch_sequences=1)
    assert run_ranks(num_ranks, grads_around_a_step, config) == [[]] * num_ranks
