"""The router's product: in fp32 on a CPU, and as accurate on a GPU, where bf16 is multiplied.

Shape legend: B sequences, S positions, D hidden, E experts.
"""

from __future__ import annotations

import pytest
import torch
from support.gpu_products import gpu_products

from amalthea.kernels.products import product_fp32
from amalthea.kernels.router import _split, router_logits, router_logits_plain

B, S, D, E = 3, 41, 96, 24


def draw(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [B, S, D], weight [E, D], and an fp32 gradient of the logits whose sizes differ as a sigmoid's do."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((B, S, D), (E, D), (B, S, E)))
    return x.to(dtype), weight.mul(0.05).to(dtype), grad.exp().sub(1)


def gradients(
    function: object, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and the gradients of x and weight."""
    assert callable(function)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    logits = function(*leaves)
    x_grad, weight_grad = torch.autograd.grad(logits, leaves, grad)
    return logits.detach(), x_grad, weight_grad


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Of the whole tensor, relative."""
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_multiplies_copies_in_fp32(dtype: torch.dtype) -> None:
    got, expected = gradients(router_logits, *draw(dtype)), gradients(router_logits_plain, *draw(dtype))
    assert got[0].dtype == torch.float32
    assert got[1].dtype == got[2].dtype == dtype
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))


def test_a_gpu_is_as_accurate_as_fp32_until_the_last_rounding() -> None:
    x, weight, grad = draw(torch.bfloat16)
    exact = gradients(router_logits_plain, x.double(), weight.double(), grad.double())
    plain = gradients(router_logits_plain, x, weight, grad)
    with gpu_products():
        got = gradients(router_logits, x, weight, grad)
    assert got[0].shape == (B, S, E)
    assert error(got[0], exact[0]) < 1e-6
    for mine, twin, truth in zip(got[1:], plain[1:], exact[1:], strict=True):
        assert mine.dtype == torch.bfloat16
        # Both end in bf16; what is more in the split is far below that rounding.
        assert error(mine, truth) < 1.01 * error(twin, truth)


def test_two_parts_hold_a_gradient_hundreds_of_times_as_well_as_one() -> None:
    """Before the last rounding, which would hide it."""
    _, weight, grad = draw(torch.bfloat16)
    rows = grad.flatten(0, 1)
    exact = rows.double() @ weight.double()
    with gpu_products():
        both = product_fp32(_split(rows), weight.repeat(2, 1))
        one = product_fp32(rows.bfloat16(), weight)
    assert error(both, exact) < 1e-5
    assert error(one, exact) > 100 * error(both, exact)


def test_no_tokens_at_all() -> None:
    x, weight = torch.empty(1, 0, D, dtype=torch.bfloat16), draw(torch.bfloat16)[1]
    with gpu_products():
        logits, x_grad, weight_grad = gradients(router_logits, x, weight, torch.empty(1, 0, E))
    assert logits.shape == (1, 0, E)
    assert x_grad.shape == x.shape
    assert not weight_grad.any()
