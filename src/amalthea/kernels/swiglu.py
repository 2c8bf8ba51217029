"""The gated activation of feed-forward layers, keeping only its inputs for backward.

Shape legend: N rows, F hidden features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up. Shapes: all […, F]. Memory: one output; backward keeps gate and up."""
    return _SwiGLU.apply(gate, up, None)  # type: ignore[no-any-return]


def weighted_swiglu(gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up · weight of the row. Shapes: gate and up [N, F]; weights [N], in the same dtype."""
    return _SwiGLU.apply(gate, up, weights[:, None])  # type: ignore[no-any-return]


def swiglu_plain(gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of both, as the formula reads."""
    hidden = F.silu(gate) * up
    return hidden if weights is None else hidden * weights[:, None]


class _SwiGLU(torch.autograd.Function):
    """`weights` is [N, 1] or none. In-place products reuse what this function itself made."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(gate, up, weights)
        hidden = F.silu(gate).mul_(up)
        return hidden if weights is None else hidden.mul_(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        gate, up, weights = ctx.saved_tensors
        (grad,) = grads
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
        return gate_grad, up_grad, weights_grad
