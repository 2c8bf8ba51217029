"""RMSNorm equals its formula, and the CPU's own path differs from torch's by rounding only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from amalthea.kernels.rms_norm import rms_norm, rms_norm_plain

EPS = 1e-3
SHAPES = [(5, 16), (2, 3, 7, 8), (1, 1), (0, 4), (9, 300)]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_gradients(
    norm: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, upstream: torch.Tensor
) -> list[torch.Tensor]:
    """The output and the gradients by x and weight."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight)]
    out = norm(*leaves, eps=EPS)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_the_twin(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    # Far from mean 0, so that a mean which is subtracted and not put back would show.
    x, weight, upstream = draw(*shape) + 0.7, draw(shape[-1], seed=1), draw(*shape, seed=2) + 0.4
    expected = with_gradients(rms_norm_plain, x, weight, upstream)
    got = with_gradients(rms_norm, x.to(dtype), weight.to(dtype), upstream.to(dtype))
    for left, right in zip(got, expected, strict=True):
        assert left.dtype == dtype
        torch.testing.assert_close(left.double(), right, rtol=tolerance, atol=tolerance * shape[0])


def test_gradcheck() -> None:
    x, weight = draw(3, 5).requires_grad_(), draw(5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, eps=EPS), (x, weight))


def test_strided_input_and_gradient_are_read_right() -> None:
    x, weight = draw(4, 6, 8).transpose(0, 1), draw(8, seed=1)
    upstreams = [draw(4, 6, 8, seed=2).transpose(0, 1), draw(8, seed=2).expand(6, 4, 8), draw(1).expand(6, 4, 8)]
    for upstream in upstreams:
        assert not upstream.is_contiguous()
        expected = with_gradients(rms_norm_plain, x, weight, upstream)
        for left, right in zip(with_gradients(rms_norm, x, weight, upstream), expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1e-15, 1e15])
def test_tiny_and_huge_rows_stay_finite(scale: float) -> None:
    x, weight = draw(3, 8, dtype=torch.float32) * scale, torch.ones(8)
    expected = with_gradients(rms_norm_plain, x.double(), weight.double(), torch.ones(3, 8, dtype=torch.float64))
    got = with_gradients(rms_norm, x, weight, torch.ones(3, 8))
    for left, right in zip(got, expected, strict=True):
        assert left.isfinite().all()
        torch.testing.assert_close(left.double(), right, rtol=1e-4, atol=1e-6 * float(right.abs().max()))


def test_bf16_is_torchs_own() -> None:
    x, weight = draw(3, 8, dtype=torch.bfloat16), draw(8, dtype=torch.bfloat16, seed=1)
    assert torch.equal(rms_norm(x, weight, eps=EPS), F.rms_norm(x, (8,), weight, EPS))


def test_without_gradients_and_under_recompute() -> None:
    x, weight, upstream = draw(3, 8), draw(8, seed=1), draw(3, 8, seed=2)
    plain = with_gradients(rms_norm, x, weight, upstream)
    again = with_gradients(lambda *a, **k: checkpoint(rms_norm, *a, use_reentrant=False, **k), x, weight, upstream)
    assert all(torch.equal(left, right) for left, right in zip(plain, again, strict=True))
    with torch.no_grad():
        assert torch.equal(rms_norm(x.requires_grad_(), weight, eps=EPS), plain[0])
    assert rms_norm(draw(3, 8).to("meta"), weight.to("meta"), eps=EPS).shape == (3, 8)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_one_side_may_be_frozen(frozen: str) -> None:
    x, weight, upstream = draw(3, 8), draw(8, seed=1), draw(3, 8, seed=2)
    _, x_grad, weight_grad = with_gradients(rms_norm, x, weight, upstream)
    leaf = weight.requires_grad_() if frozen == "x" else x.requires_grad_()
    (got,) = torch.autograd.grad(rms_norm(x, weight, eps=EPS), leaf, upstream)
    assert torch.equal(got, weight_grad if frozen == "x" else x_grad)
