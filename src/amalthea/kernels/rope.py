"""Rotary position embedding, applied without building the rotated copy that `cat` would need.

Shape legend: B sequences, S positions, H heads, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch

from amalthea.kernels.device import on_gpu
from amalthea.kernels.fused import fused


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, fuse: bool = True) -> torch.Tensor:
    """Turns each pair (x[i], x[i + d/2]) by its position's angle.

    Shapes: x [B, S, H, d]; cos and sin [S, d/2] in fp32. Returns [B, S, H, d] in x's dtype, computed in fp32.
    On a GPU, unless `fuse` is off, one kernel each way. Memory: one output; backward keeps only cos and sin.
    Source: RoFormer (arXiv 2104.09864), in the half-split order of GPT-NeoX and GLM-4-MoE.
    """
    return _Rotate.apply(x, cos, sin, fuse)  # type: ignore[no-any-return]


def rotate_plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Twin of `rotate`, as the formula reads."""
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, fuse: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turn = _rotation if fuse and on_gpu(x) else _turn
        return ctx.turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return ctx.turn(grads[0], cos, sin, -1), None, None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, cos.dtype)
    x, out_dtype = x.to(dtype), x.dtype
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    out = x * torch.cat((cos, cos), dim=-1)
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-direction)
    out_second.addcmul_(first, sin, value=direction)
    return out.to(out_dtype)


@fused
def _rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    """`_turn` without slices that are written apart: halves [B, S, H, 2, d/2], and the same with halves exchanged."""
    halves = x.to(torch.promote_types(x.dtype, cos.dtype)).unflatten(-1, (2, -1))
    signs = torch.arange(-direction, 2 * direction, 2 * direction, dtype=sin.dtype, device=x.device)
    turned = halves * cos[:, None, None] + halves.flip(-2) * (sin[:, None, None] * signs[:, None])
    return turned.flatten(-2).to(x.dtype)
