"""RoPE is a rotation by position: equal to complex multiplication, and it keeps lengths and relative angles.

Shape legend: B sequences, S positions, H heads, d head dim.
"""

from __future__ import annotations

import pytest
import torch

from amalthea.kernels.rope import rotate, rotate_plain

B, S, H, D = 2, 9, 3, 8


def angles(theta: float = 100.0) -> torch.Tensor:
    """[S, d/2] in float64."""
    return torch.arange(S, dtype=torch.float64)[:, None] / theta ** (torch.arange(0, D, 2, dtype=torch.float64) / D)


def draw(seed: int = 0) -> torch.Tensor:
    return torch.randn(B, S, H, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotated(x: torch.Tensor) -> torch.Tensor:
    return rotate(x, angles().cos(), angles().sin())


def reference(x: torch.Tensor) -> torch.Tensor:
    """The pair (x[i], x[i + d/2]) as one complex number, times e^(i·angle)."""
    numbers = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    turned = numbers * torch.polar(torch.ones_like(angles()), angles())[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("function", [rotate, rotate_plain])
def test_equals_complex_multiplication(function) -> None:
    x = draw()
    torch.testing.assert_close(function(x, angles().cos(), angles().sin()), reference(x), rtol=1e-14, atol=1e-14)
    half = function(x.float(), angles().cos().float(), angles().sin().float())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), reference(x), rtol=1e-6, atol=1e-6)


def test_gradient_equals_that_of_the_plain_formula() -> None:
    x, upstream = draw().requires_grad_(), draw(1)
    (expected,) = torch.autograd.grad(reference(x), x, upstream)
    (got,) = torch.autograd.grad(rotated(x), x, upstream)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
    small = draw()[:1, :3, :1].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: rotate(t, angles().cos()[:3], angles().sin()[:3]), small)


def test_bf16_is_rounded_once_at_the_end() -> None:
    x = draw().bfloat16()
    cos, sin = angles().cos().float(), angles().sin().float()
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())
    assert torch.equal(rotate(x, cos, sin), rotate_plain(x, cos, sin))


def test_the_input_is_left_as_it_was() -> None:
    x = draw()
    before = x.clone()
    rotated(x)
    assert torch.equal(x, before)


def test_position_zero_stays_and_lengths_stay() -> None:
    x = draw()
    assert torch.equal(rotated(x)[:, 0], x[:, 0])
    torch.testing.assert_close(rotated(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)
    assert not torch.allclose(rotated(x)[:, 1:], x[:, 1:])


def test_scores_depend_on_the_distance_alone() -> None:
    query, key = (draw(seed)[:1, :1].expand(1, S, H, D) for seed in (0, 1))
    scores = torch.einsum("bqhd,bkhd->hqk", rotated(query), rotated(key))
    for distance in range(1 - S, S):
        diagonal = scores.diagonal(distance, dim1=1, dim2=2)
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(scores[:, 0, 0], scores[:, 0, 1])


def test_strided_input_and_gradient_are_read_right() -> None:
    x = draw().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not x.is_contiguous()
    torch.testing.assert_close(rotated(x), reference(x), rtol=1e-14, atol=1e-14)
    (got,) = torch.autograd.grad(rotated(x).sum(), x)  # an expanded gradient with stride 0
    (expected,) = torch.autograd.grad(reference(x).sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
