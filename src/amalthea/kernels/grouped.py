"""Matrix products over a stack of experts.

Shape legend: N rows (one per token and chosen expert, sorted by expert), E experts, I input, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from amalthea.kernels.saved import Held, last_of_block

_GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, *, ends: torch.Tensor, held: Held | None = None
) -> torch.Tensor:
    """Rows `ends[e-1] : ends[e]` times `weight[e]` transposed.

    Shapes: rows [N, I]; weight [E, O, I]; ends int32 [E], the running sum of rows per expert, last ≤ N. Returns
    [N, O]; rows past the last end are unspecified. I and O must be multiples of 16 bytes. `held` is what holds rows,
    weight and ends, by choice; else they are saved here.
    """
    if rows.dtype not in _GROUPED_MM_DTYPES or not rows.shape[0]:
        return grouped_linear_plain(rows, weight, ends=ends)
    if held is not None:
        return _GroupedLinear.apply(rows, weight, ends, held)  # type: ignore[no-any-return]
    return F.grouped_mm(rows, weight.transpose(-1, -2), offs=ends)


def grouped_linear_plain(rows: torch.Tensor, weight: torch.Tensor, *, ends: torch.Tensor) -> torch.Tensor:
    """Twin of `grouped_linear`, a loop over experts; waits for the device."""
    stops = ends.tolist()
    parts = [
        F.linear(rows[start:stop], weight[expert])
        for expert, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))
    ]
    return torch.cat(parts)


class _GroupedLinear(torch.autograd.Function):
    """What autograd does for `F.grouped_mm`, with everything held elsewhere."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, held: Held) -> torch.Tensor:
        ctx.held = held
        with last_of_block():
            return F.grouped_mm(rows, weight.transpose(-1, -2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows, weight, ends = ctx.held.tensors()
        grad = grads[0].contiguous()
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        rows_grad = F.grouped_mm(grad, weight, offs=ends) if needs_rows else None
        weight_grad = F.grouped_mm(grad.t(), rows, offs=ends) if needs_weight else None
        return rows_grad, weight_grad, None, None
