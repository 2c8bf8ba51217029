"""The gradient norm of any mesh is that of one process, every expert included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import microbatches, run_steps, tiny_config

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.world import World
from amalthea.train.build import build
from amalthea.train.step import train_step

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (4, {}),
    "hsdp": (4, {"parallel__dp_replicate": 2}),
    "replicas": (2, {"parallel__dp_replicate": 2}),
    "ep2-fsdp2": (4, {"parallel__ep": 2}),
    "ep4": (4, {"parallel__ep": 4}),
    "hsdp-ep2": (4, {"parallel__dp_replicate": 2, "parallel__ep": 2}),
}
# Experts that weigh: without this they are a hundredth of the tiny model's norm, and nobody would miss them.
HEAVY: dict[str, Any] = {
    "model__num_layers": 1,
    "train__max_grad_norm": None,
    "model__moe__route_scale": 8.0,
    "model__moe__num_shared_experts": 0,
}


def squares_by_parameter(world: World, config: RunConfig) -> tuple[float, dict[str, float]]:
    """The norm that a step of one process reports, and each gradient's sum of squares in float64."""
    run = build(config, resolve(config, world_size=1), world)
    run.optimizers.zero_grad = lambda: None  # type: ignore[method-assign]  # keeps the gradients to look at
    result = train_step(run, microbatches(run, 0), lr_factor=1.0, tallies=())
    squares = {}
    for name, parameter in run.model.named_parameters():
        assert parameter.grad is not None, name
        squares[name] = parameter.grad.double().square().sum().item()
    return result.grad_norm, squares


@pytest.fixture(scope="module")
def single() -> tuple[float, dict[str, float]]:
    return run_ranks(1, squares_by_parameter, tiny_config(**HEAVY))[0]


@pytest.mark.case(7)
def test_one_process_counts_every_parameter(single: tuple[float, dict[str, float]]) -> None:
    norm, squares = single
    assert norm == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-6)
    without = math.sqrt(sum(square for name, square in squares.items() if ".experts." not in name))
    assert without < 0.9 * norm, "a norm without the experts would be seen"


@pytest.mark.case(7)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_reports_the_same_norm_on_every_rank(mesh: str, single: tuple[float, dict[str, float]]) -> None:
    num_ranks, changes = MESHES[mesh]
    curves = run_ranks(num_ranks, run_steps, tiny_config(**HEAVY, **changes), 1)
    assert len({curve.grad_norms[0] for curve in curves}) == 1
    assert curves[0].grad_norms[0] == pytest.approx(single[0], rel=1e-5)


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp-ep2"])
def test_gradients_are_scaled_down_to_the_limit(mesh: str) -> None:
    """By a limit of a hundredth the weights move as those of one process do; AdamW with a large eps shows scale."""
    num_ranks, changes = MESHES[mesh]
    loose = {"optim__adamw__eps": 1.0, "optim__adamw__weight_decay": 0.0}
    one, unlimited = (
        run_ranks(1, run_steps, tiny_config(train__max_grad_norm=limit, **loose), 1)[0] for limit in (0.01, None)
    )
    four = run_ranks(num_ranks, run_steps, tiny_config(train__max_grad_norm=0.01, **loose, **changes), 1)[0]
    for name, weight in one.parameters.items():
        torch.testing.assert_close(four.parameters[name], weight, rtol=0, atol=1e-7, msg=name)
    moved = max((unlimited.parameters[name] - weight).abs().max().item() for name, weight in one.parameters.items())
    assert moved > 1e-5, "the limit matters"
