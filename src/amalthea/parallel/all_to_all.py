"""Uneven all-to-all of rows, and of how many rows it will be.

Shape legend: P ranks of a group, M rows received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

ReadSplits = Callable[[torch.Tensor], list[list[int]]]
"""Brings the rows sent to and received from each rank, [2, P], to the host."""


def exchange_counts(
    counts: torch.Tensor, group: dist.ProcessGroup, read_splits: ReadSplits
) -> tuple[list[int], list[int], torch.Tensor]:
    """Rows sent to and received from each rank, and the received counts [P, counts / P].

    counts: int64, an equal number for each rank. Communication: one all-to-all, and one wait for the device: the
    uneven all-to-all takes its splits from the host.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    both = torch.stack((counts, received)).view(2, group.size(), -1)
    sent_splits, received_splits = read_splits(both.sum(dim=-1))
    return sent_splits, received_splits, both[1]


class AllToAll(torch.autograd.Function):
    """Uneven all-to-all of rows (`all_to_all`) whose gradient is the all-to-all back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, out_splits: list[int], in_splits: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (out_splits, in_splits), group
        return all_to_all(rows, out_splits, in_splits, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        out_splits, in_splits = ctx.splits
        return all_to_all(grads[0], in_splits, out_splits, ctx.group), None, None, None


def all_to_all(
    rows: torch.Tensor, out_splits: list[int], in_splits: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends `in_splits` rows to each rank and returns the `out_splits` rows that come from each, [M, …]."""
    out = rows.new_empty((sum(out_splits), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), out_splits, in_splits, group=group)
    return out
