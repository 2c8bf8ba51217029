"""Uneven all-to-all of rows, and of how many rows it will be.

Shape legend: P ranks of a group, M rows received, C chunks of a pass's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Splits = list[list[int]]
"""Rows sent to each rank of a group, and rows received from each."""
ReadSplits = Callable[[torch.Tensor], list[Splits]]
"""Brings the rows sent and received of each chunk, [C, 2, P], to the host."""


def exchange_counts(
    counts: torch.Tensor, group: dist.ProcessGroup, read_splits: ReadSplits
) -> tuple[list[Splits], torch.Tensor]:
    """Rows sent to and received from each rank, chunk by chunk, and the received counts [C, P, keys / P].

    counts: int64 [C, keys], an equal number of keys for each rank. Communication: one all-to-all, and one wait for the
    device: the uneven all-to-all takes its splits from the host.
    """
    by_rank = counts.view(len(counts), group.size(), -1).transpose(0, 1).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group)
    both = torch.stack((by_rank, received)).permute(2, 0, 1, 3)
    return read_splits(both.sum(dim=-1)), both[:, 1]


class Trip:
    """One uneven all-to-all that goes on beside the computation, and so does its way back in backward.

    Launch, compute, finish: `depart` sends and returns a buffer that nobody may read, `arrive` waits for it. In
    backward the gradient departs where the rows arrived, and arrives where they departed. What is sent is held until
    it has been waited for.
    """

    def __init__(self, group: dist.ProcessGroup, in_splits: list[int], out_splits: list[int]) -> None:
        self.group, self.splits = group, (in_splits, out_splits)
        self._under_way: tuple[torch.Tensor, torch.Tensor, Any] | None = None

    def depart(self, rows: torch.Tensor) -> torch.Tensor:
        """Starts to send `in_splits` of the rows to each rank: [N, …] → a buffer for [M, …]."""
        return _Depart.apply(rows, self)  # type: ignore[no-any-return]

    def arrive(self, buffer: torch.Tensor) -> torch.Tensor:
        """What `depart` returned, filled."""
        return _Arrive.apply(buffer, self)  # type: ignore[no-any-return]

    def start(self, rows: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Sends, and returns the buffer; `back` takes rows to where they came from."""
        sent, received = reversed(self.splits) if back else self.splits
        rows = rows.contiguous()
        buffer = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(buffer, rows, received, sent, group=self.group, async_op=True)
        self._under_way = rows, buffer, work
        return buffer

    def finish(self) -> torch.Tensor:
        """Waits for what was started last, and returns it."""
        assert self._under_way is not None, "it departs before it arrives"
        _, buffer, work = self._under_way
        self._under_way = None
        work.wait()
        return buffer


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.trip = trip
        return trip.start(rows, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.trip.finish(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.trip = trip
        return trip.finish().view_as(buffer)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # What departs here is the gradient of what departed in forward; what is handed on is not looked at.
        ctx.trip.start(grads[0], back=True)
        return grads[0], None
