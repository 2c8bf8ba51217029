"""Copies between a device and the host that run beside the computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass
class Ticket:
    """A copy under way; `event` is whatever its engine waits on, none where the copy is done already."""

    event: Any = None


class Copies(Protocol):
    """An engine of asynchronous copies. All methods are called from the computing thread."""

    def host_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory [elements], one allocation, pinned where that makes copies asynchronous."""
        ...

    def device_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor: ...

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        """Starts a copy once the computation enqueued so far is done. The caller holds `source` until it has waited."""
        ...

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        """Starts a copy once the computation enqueued so far is done."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Whatever is computed from here on comes after the copy."""
        ...


class DirectCopies:
    """Copies at once: where the device is the host, for trying things out."""

    def host_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def device_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        target.copy_(source.reshape(-1))
        return Ticket()

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        target.copy_(source)
        return Ticket()

    def wait(self, ticket: Ticket) -> None:
        pass


class CudaCopies:
    """One stream for each direction, so that both run beside the computation and beside each other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def host_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=True)

    def device_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device=self.device)

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        return self._copy(source.reshape(-1), target, self._out)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        return self._copy(source, target, self._back)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream) -> Ticket:
        # Named before the side stream becomes the current one; asked inside, it would wait for itself.
        computing = torch.cuda.current_stream(self.device)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return Ticket(stream.record_event())

    def wait(self, ticket: Ticket) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket.event)


def copies_for(device: torch.device) -> Copies:
    """The engine for a device."""
    return CudaCopies(device) if device.type == "cuda" else DirectCopies()
