"""Root-mean-square normalization.

The CPU has no fused kernel for it: torch composes it of about twenty passes over the tensor, forward and backward.
Here it takes three and four, with the backward of layer normalization at mean 0 as the main part.

Shape legend: D normalized features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from amalthea.kernels.device import on_host


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension.

    Shapes: x […, D]; weight [D]; returns x's shape. Memory on a CPU: the output; backward keeps x and one number per
    row. Source: Zhang and Sennrich (arXiv 1910.07467).
    """
    if on_host(x) and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_plain(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Twin of `rms_norm`, as the formula reads."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x, inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        (grad,) = grads
        # Layer normalization subtracts a mean, and its gradient therefore the mean of grad · weight: it goes back in.
        x_grad, weight_grad, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(inverse), inverse, weight, None, (True, True, False)
        )
        mean = (grad @ weight).unsqueeze(-1).mul_(inverse).div_(x.shape[-1])
        return x_grad.add_(mean), weight_grad, None
