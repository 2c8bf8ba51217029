"""Muon's update equals `torch.optim.Muon`'s, matrix by matrix, on 2-D parameters and on stacks.

Tolerances: Newton-Schulz runs in bf16, whose relative rounding is 2⁻⁸ = 0.004, and a batched product may sum in
another order than a single one. Updates are compared by their relative Frobenius distance.

Shape legend: E matrices in a stack, R rows, C columns.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from amalthea.optim.config import MuonConfig
from amalthea.optim.muon import Muon, update_scale

SHAPES = ((24, 40), (40, 24), (32, 32))
AdjustLr = Literal["original", "match_rms_adamw"]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm())


def theirs(weights: list[torch.Tensor], grads: list[list[torch.Tensor]], config: MuonConfig) -> list[torch.Tensor]:
    """The weights after torch.optim.Muon's steps."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = torch.optim.Muon(
        parameters,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.num_steps,
        adjust_lr_fn=config.adjust_lr,
    )
    return _step(parameters, grads, optimizer)


def ours(weights: list[torch.Tensor], grads: list[list[torch.Tensor]], config: MuonConfig) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    return _step(parameters, grads, Muon(parameters, config=config))


def _step(parameters: list[Any], grads: list[list[torch.Tensor]], optimizer: torch.optim.Optimizer) -> list:
    for step_grads in grads:
        for parameter, grad in zip(parameters, step_grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, step_grads, strict=True)), "gradients stay"
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_matrices_and_stacks_equal_torch(nesterov: bool, adjust_lr: AdjustLr, weight_decay: float) -> None:
    config = MuonConfig(
        lr=0.05, momentum=0.8, nesterov=nesterov, adjust_lr=adjust_lr, weight_decay=weight_decay, num_steps=5
    )
    steps, count = 4, 3
    for rows, columns in SHAPES:
        stack = draw(count, rows, columns)
        grads = [draw(count, rows, columns, seed=1 + step) for step in range(steps)]
        expected = torch.stack(theirs([*stack], [[*grad] for grad in grads], config))
        (as_stack,) = ours([stack], [[grad] for grad in grads], config)
        as_matrices = torch.stack(ours([*stack], [[*grad] for grad in grads], config))
        for got in (as_stack, as_matrices):
            # The weights' distance says little where they are large, so what the steps changed is compared.
            assert distance(got - stack, expected - stack) < 5e-3


def test_momentum_is_kept_exactly() -> None:
    config = MuonConfig(lr=0.05, momentum=0.8)
    parameter = torch.nn.Parameter(draw(4, 8, 8))
    optimizer = Muon([parameter], config=config)
    assert torch.equal(optimizer.state[parameter]["momentum"], torch.zeros(4, 8, 8)), "it is there from the start"
    expected = torch.zeros(4, 8, 8)
    for step in range(3):
        parameter.grad = draw(4, 8, 8, seed=step)
        optimizer.step()
        expected = 0.8 * expected + 0.2 * parameter.grad
    torch.testing.assert_close(optimizer.state[parameter]["momentum"], expected, rtol=1e-6, atol=1e-6)


def test_more_matrices_of_a_shape_than_a_batch_and_several_shapes_at_once() -> None:
    config = MuonConfig(lr=0.05)
    weights = [draw(*SHAPES[i % 3], seed=i) for i in range(33)]
    grads = [[draw(*weight.shape, seed=100 + i) for i, weight in enumerate(weights)]]
    got, expected = ours(weights, grads, config), theirs(weights, grads, config)
    for weight, left, right in zip(weights, got, expected, strict=True):
        assert distance(left - weight, right - weight) < 5e-3


def test_a_parameter_without_gradient_or_without_rows_stays() -> None:
    frozen, empty = torch.nn.Parameter(draw(8, 8)), torch.nn.Parameter(torch.empty(0, 8, 8))
    trained = torch.nn.Parameter(draw(8, 8))
    before = [frozen.detach().clone(), trained.detach().clone()]
    optimizer = Muon([frozen, empty, trained], config=MuonConfig())
    empty.grad, trained.grad = torch.empty(0, 8, 8), draw(8, 8)
    optimizer.step()
    assert torch.equal(frozen, before[0])
    assert not torch.equal(trained, before[1])


def test_weight_decay_is_decoupled() -> None:
    weight = draw(8, 8)
    config = MuonConfig(lr=0.1, weight_decay=0.3)
    (got,) = ours([weight], [[torch.zeros(8, 8)]], config)
    torch.testing.assert_close(got, weight * (1 - 0.1 * 0.3), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("rows", "columns", "adjust_lr", "expected"),
    [
        (64, 16, "original", 2.0),
        (16, 64, "original", 1.0),
        (64, 16, "match_rms_adamw", 1.6),
        (16, 64, "match_rms_adamw", 1.6),
    ],
)
def test_update_scale(rows: int, columns: int, adjust_lr: str, expected: float) -> None:
    assert update_scale(rows, columns, adjust_lr=adjust_lr) == pytest.approx(expected)


def test_match_rms_adamw_gives_updates_of_deviation_a_fifth() -> None:
    """Moonshot's claim (arXiv 2502.16982): the root mean square of AdamW's updates, 0.2 to 0.4."""
    for rows, columns in ((32, 96), (96, 32)):
        weight = torch.zeros(rows, columns)
        config = MuonConfig(lr=1.0, weight_decay=0.0, adjust_lr="match_rms_adamw")
        (got,) = ours([weight], [[draw(rows, columns)]], config)
        assert 0.15 < got.square().mean().sqrt().item() < 0.25
