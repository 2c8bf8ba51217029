"""Moving tokens to their experts' rows and back.

A *slot* is one (token, choice) pair, numbered token · K + choice. `order[n]` is the slot in row n once slots are
sorted by expert; `place[slot]` is its row. Scatter and gather are each other's gradients, so both directions
read by index and nothing is accumulated by atomics: results repeat bit for bit.

Shape legend: T tokens, K choices per token, N = T·K rows, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from amalthea.kernels.device import on_gpu, on_host
from amalthea.kernels.fused import fused
from amalthea.kernels.saved import Held


def sort_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts slots by expert, keeping tokens in order within an expert.

    Shapes: experts int64 [T, K]. Returns order [N], place [N] and counts [num_experts], all int64, without waiting
    for the device.
    """
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return order, place, count_slots(experts, num_experts)


def count_slots(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many slots each expert has: int64 [T, K] → int64 [num_experts], without waiting for the device."""
    flat = experts.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))


def to_rows(tokens: torch.Tensor, *, order: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Copies each token to the rows of its experts: [T, D] → [N, D]."""
    return _ToRows.apply(tokens, order, place)  # type: ignore[no-any-return]


def to_rows_twice(
    tokens: torch.Tensor, *, order: torch.Tensor, place: torch.Tensor, fuse: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`to_rows` for two uses: the same rows [N, D], named twice.

    On a GPU, unless `fuse` is off, and where each token has one row, the two gradients are added by the kernel that
    takes them back to tokens, and not before it.
    """
    if fuse and on_gpu(tokens) and len(tokens) == order.numel():
        return _ToRowsTwice.apply(tokens, order, place)  # type: ignore[no-any-return]
    rows = to_rows(tokens, order=order, place=place)
    return rows, rows


def sum_to_tokens(
    rows: torch.Tensor, *, order: torch.Tensor, place: torch.Tensor, top_k: int, held: Held | None = None
) -> torch.Tensor:
    """Sums each token's rows in the order of its choices: [N, D] → [T, D].

    `held` is what holds `order`, by choice; else it is saved here.
    """
    return _SumToTokens.apply(rows, order, place, top_k, held)  # type: ignore[no-any-return]


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        # A rank of expert parallelism may have no tokens at all.
        ctx.top_k = order.numel() // tokens.shape[0] if len(tokens) else 1
        ctx.save_for_backward(place)
        return _spread(tokens, order, ctx.top_k)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _gather_sum(grads[0], place, ctx.top_k), None, None


class _ToRowsTwice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, order: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(place)
        rows = tokens.index_select(0, order)
        return rows, rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _rows_of_both(*grads, place), None, None


@fused
def _rows_of_both(first: torch.Tensor, second: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Row `place[n]` of both [N, D], added."""
    return first.index_select(0, place) + second.index_select(0, place)


class _SumToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor, top_k: int, held: Held | None
    ) -> torch.Tensor:
        ctx.top_k, ctx.held = top_k, held
        if held is None:
            ctx.save_for_backward(order)
        return _gather_sum(rows, place, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (order,) = ctx.saved_tensors if ctx.held is None else ctx.held.tensors()
        return _spread(grads[0], order, ctx.top_k), None, None, None, None


def _spread(tokens: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    return tokens.index_select(0, order // top_k)


def _gather_sum(rows: torch.Tensor, place: torch.Tensor, top_k: int) -> torch.Tensor:
    """Reads each row once and sums in fp32; a CPU's bag of bf16 is slow, so there the rows are copied first."""
    if top_k == 1:
        return rows.index_select(0, place)
    if on_host(rows) and rows.dtype != torch.float32:
        return rows.index_select(0, place).view(-1, top_k, rows.shape[1]).sum(dim=1)
    return F.embedding_bag(place.view(-1, top_k), rows.contiguous(), mode="sum")
