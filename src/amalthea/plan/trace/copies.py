"""The engine of boundary copies that writes down what `memory/copies.py`'s engine for CUDA does."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amalthea.memory.copies import Ticket
from amalthea.plan.events import Copy, HostMemory
from amalthea.plan.trace.recorder import Recorder
from amalthea.plan.trace.streams import TracedStream


class TracedCopies:
    """Implements `memory.copies.Copies`: one stream for each direction, nothing copied."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode) -> None:
        self._recorder, self._mode = recorder, mode
        self._out, self._back = TracedStream(recorder, name="to_host"), TracedStream(recorder, name="to_device")
        self.host: list[HostMemory] = []
        """What was allocated on the host, before the trace began."""

    def host_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        self.hold(elements * dtype.itemsize)
        buffer = self._empty(elements, dtype)
        self._recorder.ignore(buffer)
        return buffer

    def hold(self, num_bytes: int) -> None:
        """Counts host memory that something else allocates."""
        self.host.append(HostMemory(num_bytes, "pinned"))

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like this one in host memory that is counted already."""
        found = self._empty(tensor.numel(), tensor.dtype)
        self._recorder.ignore(found)
        with self._mode:
            return found.view(tensor.shape)

    def device_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """For a boundary where the model is built; in a step, for optimizer state that visits."""
        buffer = self._empty(elements, dtype)
        memory = "boundaries" if self._recorder.phase.name == "build" else self._recorder.memory
        with self._recorder.allocating(memory):
            self._recorder.see(buffer, "landing")
        return buffer

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        return self._copy("to_host", source, self._out)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        return self._copy("to_device", target, self._back)

    def wait(self, ticket: Ticket) -> None:
        ticket.event.wait()

    def _copy(self, direction: str, device_side: torch.Tensor, stream: TracedStream) -> Ticket:
        stream.wait_stream(TracedStream(self._recorder, name=self._recorder.stream))
        num_bytes = device_side.numel() * device_side.element_size()
        self._recorder.write(Copy("to_host" if direction == "to_host" else "to_device", num_bytes, stream.name))
        return Ticket(stream.record_event())

    def _empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        with self._mode:
            return torch.empty(elements, dtype=dtype)
