"""Products over a stack of experts equal a loop written plainly, whatever the sizes of the groups.

Shape legend: N rows sorted by expert, E experts, I input, O output features.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amalthea.kernels.grouped import grouped_linear, grouped_linear_plain

INPUT, OUTPUT = 16, 24
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def draw(counts: list[int], dtype: torch.dtype, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weight and ends."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(counts), INPUT, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(counts), OUTPUT, INPUT, generator=generator, dtype=torch.float64) / INPUT**0.5
    return rows.to(dtype), weight.to(dtype), torch.tensor(counts).cumsum(0).to(torch.int32)


def reference(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """One row at a time in float64."""
    expert = [e for e, count in enumerate(counts) for _ in range(count)]
    out = [weight[e].double() @ row.double() for e, row in zip(expert, rows, strict=True)]
    return torch.stack(out) if out else (rows.double() @ weight[0].double().T)


def with_gradients(function, rows: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients by rows and weight."""
    leaves = [tensor.clone().requires_grad_() for tensor in (rows, weight)]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(9)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def check(counts: list[int], dtype: torch.dtype, *, seed: int = 0, function=grouped_linear) -> list[torch.Tensor]:
    """Compares output and gradients with the reference's, and returns them."""
    rows, weight, ends = draw(counts, dtype, seed=seed)
    got = with_gradients(lambda r, w: function(r, w, ends=ends), rows, weight)
    expected = with_gradients(lambda r, w: reference(r, w, counts), rows, weight)
    for left, right in zip(got, expected, strict=True):
        assert left.dtype == dtype
        assert left.shape == right.shape
        torch.testing.assert_close(left.double(), right.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    return got


@pytest.mark.parametrize("function", [grouped_linear, grouped_linear_plain])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("counts", [[3, 5, 1], [0, 4, 0, 0, 7, 0], [9], [0, 0, 6], [2, 0, 0]])
def test_output_and_gradients_equal_a_loop_over_rows(counts: list[int], dtype: torch.dtype, function) -> None:
    *_, weight_grad = check(counts, dtype, function=function)
    for expert, count in enumerate(counts):
        assert weight_grad[expert].any() == (count > 0), "an expert without rows gets exactly zero"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_rows_at_all(dtype: torch.dtype) -> None:
    out, rows_grad, weight_grad = check([0, 0, 0], dtype)
    assert out.shape == (0, OUTPUT)
    assert rows_grad.shape == (0, INPUT)
    assert not weight_grad.any()


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=8), seed=st.integers(0, 99))
@example(counts=[0, 0, 0, 1], seed=0)
@settings(max_examples=25, deadline=None)
def test_any_groups(counts: list[int], seed: int) -> None:
    check(counts, torch.float32, seed=seed)


def test_rows_past_the_last_end_touch_nothing() -> None:
    rows, weight, ends = draw([2, 3], torch.float32)
    tail = torch.full((3, INPUT), 7.0)
    leaves = torch.cat((rows, tail)).requires_grad_(), weight.clone().requires_grad_()
    out = grouped_linear(*leaves, ends=ends)
    torch.testing.assert_close(out[:5], grouped_linear(rows, weight, ends=ends), rtol=0, atol=0)
    upstream = torch.randn(5, OUTPUT, generator=torch.Generator().manual_seed(1))
    _, weight_grad = torch.autograd.grad(out[:5], leaves, upstream)
    (expected,) = torch.autograd.grad(grouped_linear(rows, leaves[1], ends=ends), leaves[1], upstream)
    torch.testing.assert_close(weight_grad, expected, rtol=0, atol=1e-6)


def test_gradcheck_in_float64() -> None:
    rows, weight, ends = draw([2, 0, 1], torch.float64)
    leaves = rows[:, :4].clone().requires_grad_(), weight[:, :3, :4].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda r, w: grouped_linear(r, w, ends=ends), leaves)
