"""The gated activation of feed-forward layers, keeping only its inputs for backward.

Shape legend: N rows, F hidden features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from amalthea.kernels.device import on_gpu
from amalthea.kernels.fused import fused


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, fuse: bool = True) -> torch.Tensor:
    """silu(gate) · up. Shapes: all […, F]. Memory: one output; backward keeps gate and up.

    On a GPU, unless `fuse` is off, one kernel each way, computed in fp32 and rounded once.
    """
    return _SwiGLU.apply(gate, up, None, fuse)  # type: ignore[no-any-return]


def weighted_swiglu(gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor, *, fuse: bool = True) -> torch.Tensor:
    """silu(gate) · up · weight of the row. Shapes: gate and up [N, F]; weights [N], in the same dtype."""
    return _SwiGLU.apply(gate, up, weights[:, None], fuse)  # type: ignore[no-any-return]


def swiglu_plain(gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of both, as the formula reads."""
    hidden = F.silu(gate) * up
    return hidden if weights is None else hidden * weights[:, None]


class _SwiGLU(torch.autograd.Function):
    """`weights` is [N, 1] or none. In-place products reuse what this function itself made."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor | None, fuse: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up, weights)
        ctx.fuse = fuse and on_gpu(gate)
        if ctx.fuse:
            return _swiglu_forward(gate, up, weights)
        hidden = F.silu(gate).mul_(up)
        return hidden if weights is None else hidden.mul_(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, weights = ctx.saved_tensors
        (grad,) = grads
        if ctx.fuse and weights is None:
            return *_swiglu_backward(grad, gate, up), None, None
        if ctx.fuse:
            return *_weighted_swiglu_backward(grad, gate, up, weights), None
        activated = F.silu(gate)
        up_grad = grad * activated
        weights_grad = None
        if weights is not None:
            weights_grad = torch.linalg.vecdot(up_grad, up).unsqueeze(-1)
            up_grad.mul_(weights)
            activated_grad = torch.mul(grad, weights, out=activated).mul_(up)
        else:
            activated_grad = torch.mul(grad, up, out=activated)
        gate_grad = torch.ops.aten.silu_backward.grad_input(activated_grad, gate, grad_input=activated_grad)
        return gate_grad, up_grad, weights_grad, None


@fused
def _swiglu_forward(gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Weights [N, 1] or none."""
    hidden = F.silu(_wide(gate)) * _wide(up)
    if weights is not None:
        hidden = hidden * _wide(weights)
    return hidden.to(gate.dtype)


@fused
def _swiglu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up."""
    gate_grad, up_grad = _gradients(_wide(grad), _wide(gate), _wide(up))
    return gate_grad.to(gate.dtype), up_grad.to(up.dtype)


@fused
def _weighted_swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of gate, up and weights [N, 1], the last a sum over the row that the first two are made of."""
    gate_grad, up_grad = _gradients(_wide(grad), _wide(gate), _wide(up))
    weights_grad = (up_grad * _wide(up)).sum(dim=-1, keepdim=True)
    factor = _wide(weights)
    return (gate_grad * factor).to(gate.dtype), (up_grad * factor).to(up.dtype), weights_grad.to(weights.dtype)


def _gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sigmoid = gate.sigmoid()
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return grad * up * slope, grad * gate * sigmoid


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
