"""The gated activation equals its formula, keeps only its inputs, and leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from amalthea.kernels.swiglu import swiglu, swiglu_plain, weighted_swiglu

N, F = 7, 12


def draw(dtype: torch.dtype = torch.float64, *, weighted: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gate, up and, with `weighted`, weights; and the gradient from above."""
    generator = torch.Generator().manual_seed(0)
    gate, up, upstream = (torch.randn(N, F, generator=generator, dtype=torch.float64) for _ in range(3))
    weights = torch.rand(N, generator=generator, dtype=torch.float64)
    weights[2] = 0.0
    inputs = [gate, up, weights] if weighted else [gate, up]
    return [tensor.to(dtype) for tensor in inputs], upstream.to(dtype)


def with_gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], upstream: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def function(*, weighted: bool) -> Callable[..., torch.Tensor]:
    return weighted_swiglu if weighted else swiglu


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_equals_the_twin(weighted: bool, dtype: torch.dtype, tolerance: float) -> None:
    inputs, upstream = draw(weighted=weighted)
    expected = with_gradients(swiglu_plain, inputs, upstream)
    got = with_gradients(function(weighted=weighted), [t.to(dtype) for t in inputs], upstream.to(dtype))
    for left, right in zip(got, expected, strict=True):
        assert left.dtype == dtype
        torch.testing.assert_close(left.double(), right, rtol=tolerance, atol=3 * tolerance)


@pytest.mark.parametrize("weighted", [False, True])
def test_bf16_rounds_where_the_formula_does(weighted: bool) -> None:
    inputs, _ = draw(torch.bfloat16, weighted=weighted)
    assert torch.equal(function(weighted=weighted)(*inputs), swiglu_plain(*inputs))


@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(weighted: bool) -> None:
    inputs, _ = draw(weighted=weighted)
    assert torch.autograd.gradcheck(function(weighted=weighted), [tensor.requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("weighted", [False, True])
def test_only_the_inputs_are_kept_and_nothing_given_is_changed(weighted: bool) -> None:
    inputs, upstream = draw(weighted=weighted)
    before, upstream_before = [tensor.clone() for tensor in inputs], upstream.clone()
    kept: list[int] = []
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with saved_tensors_hooks(lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor):
        out = function(weighted=weighted)(*leaves)
    assert sorted(kept) == sorted(tensor.numel() for tensor in inputs)
    torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    torch.autograd.grad(out, leaves, upstream)
    assert torch.equal(upstream, upstream_before)
    assert all(torch.equal(left, right) for left, right in zip(inputs, before, strict=True))


def test_no_rows_and_any_leading_shape() -> None:
    empty = torch.empty(0, F, requires_grad=True)
    out = weighted_swiglu(empty, empty, torch.empty(0))
    out.sum().backward()
    assert out.shape == (0, F)
    (gate, up), _ = draw(weighted=False)
    assert torch.equal(swiglu(gate.view(1, N, 3, -1), up.view(1, N, 3, -1)).view(N, F), swiglu(gate, up))


def test_expanded_gradient_and_recompute() -> None:
    inputs, _ = draw(weighted=True)
    upstream = torch.ones((), dtype=torch.float64).expand(N, F)
    plain = with_gradients(weighted_swiglu, inputs, upstream)
    expected = with_gradients(swiglu_plain, inputs, upstream)
    again = with_gradients(lambda *a: checkpoint(weighted_swiglu, *a, use_reentrant=False), inputs, upstream)
    for left, middle, right in zip(plain, again, expected, strict=True):
        assert torch.equal(left, middle)
        torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)
