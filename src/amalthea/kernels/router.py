"""The router's product of tokens and experts, exact to fp32 whatever the model's dtype.

Shape legend: T tokens, D hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from amalthea.kernels.products import product_fp32, sums_in_fp32


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x · weightᵀ in fp32. Shapes: x […, D]; weight [E, D]; returns […, E].

    On a GPU bf16 is multiplied as it is, its sums in fp32: no copy of x, and the tensor cores' speed. Backward splits
    the fp32 gradient into two bf16 parts that together hold 16 of its bits. Memory, there: those parts.
    """
    if x.dtype == torch.bfloat16 and sums_in_fp32(x, weight):
        return _RouterLogits.apply(x, weight)  # type: ignore[no-any-return]
    return router_logits_plain(x, weight)


def router_logits_plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Twin of `router_logits`, of copies in fp32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype))


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return product_fp32(x.flatten(0, -2), weight.T).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        parts = _split(grads[0].flatten(0, -2))
        # Side by side [T, 2E], so that one product sums both parts before anything is rounded.
        x_grad = parts @ weight.repeat(2, 1)
        high, rest = product_fp32(parts.T, x.flatten(0, -2)).chunk(2)
        return x_grad.view_as(x), high.add_(rest).to(weight.dtype)


def _split(grad: torch.Tensor) -> torch.Tensor:
    """fp32 [T, E] → bf16 [T, 2E]: its high bits, and those of what these leave."""
    high = grad.bfloat16()
    return torch.cat((high, (grad - high).bfloat16()), dim=1)
