"""Copies that come late, over buffers that are worthless as soon as they may be reused.

Stands for a GPU's copy streams on a machine that has none: computation goes on while a thread copies, after a random
delay or only when it is waited for. What the protocol of `Copies` allows to be overwritten is overwritten at once, by
NaN:

- the target of a copy, when the copy is asked for;
- the source of a copy to the host, when the copy has been waited for;
- the source of a copy to the device (a slot of the arena), likewise, unless what rests there is read again
  (`host_is_kept`).

A source that nobody holds when its copy begins is gone, as it would be on a GPU where another tensor takes its memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from amalthea.memory.copies import Ticket


class Region:
    """Where a contiguous tensor lies, without holding it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._offset, self._elements, self._dtype = tensor.storage_offset(), tensor.numel(), tensor.dtype

    def tensor(self) -> torch.Tensor | None:
        """[elements], or none where its memory is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, self._offset, (self._elements,))

    def poison(self) -> None:
        if (tensor := self.tensor()) is not None:
            tensor.fill_(float("nan"))


@dataclass(eq=False)
class Copy:
    done: Future[None]
    source: Region
    asked_for: threading.Event
    """Set once somebody waits for the copy."""
    is_back: bool = False
    """To the device."""


class StressedCopies:
    """One thread for each direction, in order as on a stream. `max_delay_s` none: each copy as late as can be, when it,
    or one behind it, is waited for. `num_copies` counts; `close` ends the threads."""

    def __init__(self, *, seed: int, max_delay_s: float | None = 0.002, host_is_kept: bool = False) -> None:
        self.num_copies, self._host_is_kept = 0, host_is_kept
        self._under_way: dict[ThreadPoolExecutor, list[Copy]] = {}
        self._random, self._max_delay_s = random.Random(seed), max_delay_s
        self._out, self._back = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def host_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((elements,), float("nan"), dtype=dtype)

    device_buffer = host_buffer

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        return self._start(self._out, source, target)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        return self._start(self._back, source, target)

    def wait(self, ticket: Ticket) -> None:
        copy: Copy = ticket.event
        for lane in self._under_way.values():
            if copy in lane:
                for earlier in lane[: lane.index(copy) + 1]:
                    earlier.asked_for.set()
                del lane[: lane.index(copy) + 1]
        copy.done.result()
        if not (copy.is_back and self._host_is_kept):
            copy.source.poison()

    def close(self) -> None:
        for lane, copies in self._under_way.items():
            for copy in copies:
                copy.asked_for.set()
            lane.shutdown()

    def _start(self, lane: ThreadPoolExecutor, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        self.num_copies += 1
        region = Region(source)
        target.fill_(float("nan"))
        delay_s = None if self._max_delay_s is None else self._random.uniform(0, self._max_delay_s)
        asked_for = threading.Event()
        done = lane.submit(_late_copy, region, target, asked_for, delay_s)
        copy = Copy(done, region, asked_for, is_back=lane is self._back)
        self._under_way.setdefault(lane, []).append(copy)
        return Ticket(copy)


class ForgetsToWait(StressedCopies):
    """What a missing wait in the engine amounts to; `lane` is `to_host` or `to_device`."""

    def __init__(self, *, lane: str, host_is_kept: bool = False) -> None:
        super().__init__(seed=0, max_delay_s=None, host_is_kept=host_is_kept)
        self._forgotten: Callable[..., Ticket] = getattr(self, lane)
        self._unawaited: list[Ticket] = []
        setattr(self, lane, self._remember)

    def _remember(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        ticket = self._forgotten(source, target)
        self._unawaited.append(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        if not any(ticket is unawaited for unawaited in self._unawaited):
            super().wait(ticket)


def _late_copy(source: Region, target: torch.Tensor, asked_for: threading.Event, delay_s: float | None) -> None:
    asked_for.wait(delay_s)
    if (tensor := source.tensor()) is not None:
        target.copy_(tensor)
