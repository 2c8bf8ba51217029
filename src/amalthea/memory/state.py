"""Optimizer state in host memory.

Momenta and moments are used once a step, a batch at a time, in the same order every step. So they rest in host memory;
a batch comes when it is asked for, the next one of that order comes ahead, and what was used goes back while the next
one is at work.

Lifetimes: a batch on the device, a *visit*, is held until its copy back has been waited for; host memory is not read
while a copy back to it is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from amalthea.core.errors import ConfigError
from amalthea.core.units import format_bytes
from amalthea.memory.copies import Copies, Ticket

_HELD = 1
"""Visits on the device whose copy back may still be under way."""


@dataclass(frozen=True, eq=False)
class Resting:
    """Tensors that travel together: views, one after the other, of `flat` in host memory."""

    flat: torch.Tensor
    tensors: tuple[torch.Tensor, ...]


@dataclass
class _Visit:
    resting: Resting
    flat: torch.Tensor
    ticket: Ticket
    """Of the copy to the device, later of the copy back."""


class HostState:
    """State that rests in host memory (pinned beside a GPU) and visits the device. What optimizers know as a `Rest`.

    Memory on the device: at most three batches: one at work, one coming, one leaving.
    """

    def __init__(self, copies: Copies, *, device: torch.device, host_bytes: int) -> None:
        self.copies, self.device = copies, device
        self._host_bytes, self._resting_bytes = host_bytes, 0
        self._after: dict[Resting, Resting] = {}
        self._first: Resting | None = None
        self._last: Resting | None = None
        self._coming: _Visit | None = None
        self._leaving: deque[_Visit] = deque()

    def zeros(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> Resting:
        """Host memory for tensors of these shapes, which travel together.

        Raises ConfigError where all that was asked for exceeds `host_bytes`.
        """
        elements = sum(shape.numel() for shape in shapes)
        self._resting_bytes += elements * dtype.itemsize
        if self._resting_bytes > self._host_bytes:
            needed, free = format_bytes(self._resting_bytes), format_bytes(self._host_bytes)
            raise ConfigError(
                f"memory.offload_optimizer needs {needed} of host memory per rank or more, and {free} is free; "
                "set memory.offload_optimizer=false, lower memory.offload_budget_gib, or take more ranks"
            )
        flat = self.copies.host_buffer(elements, dtype).zero_()
        return Resting(flat, _views(flat, shapes))

    @contextmanager
    def at_hand(self, resting: Resting) -> Iterator[tuple[torch.Tensor, ...]]:
        """The same tensors on the device; what they hold at the end goes back to the host."""
        self._learn(resting)
        visit = self._coming if self._coming is not None and self._coming.resting is resting else self._bring(resting)
        self._coming = None
        self.copies.wait(visit.ticket)
        following = self._after.get(resting)
        # Not over the end of a step: between steps the device belongs to the model.
        if following is not None and following is not self._first and following is not resting:
            self._coming = self._bring(following)
        yield _views(visit.flat, [tensor.shape for tensor in resting.tensors])
        visit.ticket = self.copies.to_host(visit.flat, resting.flat)
        self._leaving.append(visit)
        while len(self._leaving) > _HELD:
            self._let_go()

    def settle(self) -> None:
        """Returns once everything is at rest, so that the host may read it."""
        while self._leaving:
            self._let_go()
        if self.device.type == "cuda":
            # It waits for the copies, so who waits for it has waited for them.
            torch.cuda.current_stream(self.device).synchronize()

    def _let_go(self) -> None:
        visit = self._leaving.popleft()  # held by this name until the copy has been waited for
        self.copies.wait(visit.ticket)

    def _learn(self, resting: Resting) -> None:
        if self._first is None:
            self._first = resting
        if self._last is not None:
            self._after[self._last] = resting
        self._last = resting

    def _bring(self, resting: Resting) -> _Visit:
        while any(visit.resting is resting for visit in self._leaving):
            self._let_go()
        flat = self.copies.device_buffer(resting.flat.numel(), resting.flat.dtype)
        return _Visit(resting, flat, self.copies.to_device(resting.flat, flat))


def _views(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> tuple[torch.Tensor, ...]:
    parts = flat.split([shape.numel() for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
