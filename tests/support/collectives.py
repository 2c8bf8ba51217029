"""Counts the collectives that this rank really starts, and the bytes that leave it by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_WAITS = ("wait_tensor", "barrier", "monitored_barrier_")


class Collectives(TorchDispatchMode):
    """While active, lists every collective by name, whoever starts it: all end in the dispatcher's operations.

    `bytes_sent` is what leaves this rank, with n ranks in the group: of an uneven all-to-all the parts for others, of a
    reduce-scatter (n - 1) / n of the input, of an all-gather (n - 1) times the own part. Other collectives are listed,
    and refuse to be weighed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._bytes: list[int | None] = []
        self._rows: list[tuple[int, int, int]] = []

    @property
    def bytes_sent(self) -> int:
        known = [size for size in self._bytes if size is not None]
        assert len(known) == len(self._bytes), f"no rule for some of {self.names}"
        return sum(known)

    def rows_sent(self, *, to: Callable[[int], bool], columns: int) -> int:
        """Rows [columns] of uneven all-to-alls that went to ranks for which `to` holds, this one left out."""
        return sum(rows for rank, width, rows in self._rows if width == columns and to(rank))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional", "_dtensor") and name not in _WAITS:
            self.names.append(name)
            self._bytes.append(_bytes_sent(name, args))
            self._rows += _rows_sent(name, args)
        return func(*args, **(kwargs or {}))


def _rows_sent(name: str, args: Any) -> list[tuple[int, int, int]]:
    """(global rank, columns, rows) of each part of an uneven all-to-all of matrices that leaves this rank."""
    if name != "alltoall_base_" or args[1].ndim != 2:
        return []
    group = dist.ProcessGroup.unbox(args[2])
    ranks = dist.get_process_group_ranks(group)
    parts = zip(ranks, list(args[4]) or [args[1].shape[0] // len(ranks)] * len(ranks), strict=True)
    return [(rank, args[1].shape[1], rows) for rank, rows in parts if rank != ranks[group.rank()]]


def _bytes_sent(name: str, args: Any) -> int | None:
    if name not in ("alltoall_base_", "_reduce_scatter_base_", "_allgather_base_"):
        return None
    sent: torch.Tensor = args[1]
    group = dist.ProcessGroup.unbox(args[2])
    num_bytes = sent.numel() * sent.element_size()
    if name == "_allgather_base_":
        return num_bytes * (group.size() - 1)
    if name == "_reduce_scatter_base_":
        return num_bytes * (group.size() - 1) // group.size()
    splits = list(args[4]) or [sent.shape[0] // group.size()] * group.size()
    assert sum(splits) == sent.shape[0]
    return (sent.shape[0] - splits[group.rank()]) * sent.element_size()
