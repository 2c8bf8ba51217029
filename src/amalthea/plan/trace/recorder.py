"""What a trace is written into: events, blocks of memory, streams.

Memory is followed by storages. A storage is seen first where an operation returns it, changes where it is resized, and
is gone once the last tensor on it is, of which a weak reference tells. That is what a caching allocator sees, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from amalthea.plan.events import COMPUTE, Allocate, Event, Free, Kernel, MemoryClass, Phase


@dataclass
class _Held:
    """A storage that lives. `block` is the number of its memory, none where it is empty."""

    reference: weakref.ref[Any]
    num_bytes: int = 0
    block: int | None = None


class Recorder:
    """Follows memory always, and writes events once `start` was called."""

    def __init__(self) -> None:
        self.is_recording = False
        self.stream = COMPUTE
        """The stream that is current, as a GPU's runtime would have it."""
        self.phase = Phase("build")
        self.memory: MemoryClass = "other"
        """The class of whatever is allocated now."""
        self._events: list[Event] = []
        self._resident: list[Allocate] = []
        self._alive: dict[int, Allocate] = {}
        self._held: dict[int, _Held] = {}
        self._classes: dict[int, MemoryClass] = {}
        self._num_blocks = 0
        self._num_marks = 0

    def start(self) -> None:
        """What is alive now is resident; from here on events are written."""
        self._resident = list(self._alive.values())
        self.is_recording = True

    def stop(self) -> tuple[tuple[Allocate, ...], tuple[Event, ...]]:
        """Resident blocks and events, each block with the class that it turned out to have."""
        self.is_recording = False
        resident = tuple(self._classified(block) for block in self._resident)
        events = tuple(self._classified(e) if isinstance(e, Allocate) else e for e in self._events)
        return resident, events

    @property
    def alive_bytes(self) -> int:
        return sum(block.num_bytes for block in self._alive.values())

    def write(self, event: Event) -> None:
        if self.is_recording:
            self._events.append(event)

    def new_mark(self) -> int | None:
        """A number for a `Record`; none before the trace begins, where nobody waits for it any more."""
        if not self.is_recording:
            return None
        self._num_marks += 1
        return self._num_marks

    def enter(self, name: str, where: str = "", *, memory: MemoryClass) -> None:
        """Begins a phase, and the class of what it allocates."""
        self.memory = memory
        if (name, where) != (self.phase.name, self.phase.where):
            self.phase = Phase(name, where)
            self.write(self.phase)

    def kernel(self, name: str, touched: Iterable[torch.Tensor], *, flops: float = 0.0) -> None:
        """A kernel on the current stream that reads or writes each of these tensors once; the first gives the dtype."""
        tensors = list(touched)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.write(Kernel(name, self.stream, flops, num_bytes, str(tensors[0].dtype)[6:]))

    @contextmanager
    def allocating(self, memory: MemoryClass) -> Iterator[None]:
        before, self.memory = self.memory, memory
        try:
            yield
        finally:
            self.memory = before

    def see(self, tensor: torch.Tensor, what: str) -> None:
        """Takes note of a tensor that an operation returned."""
        self.see_storage(tensor.untyped_storage(), what)

    def see_storage(self, storage: Any, what: str) -> None:
        """Takes note of a storage that is new, or whose size has changed."""
        key = storage._cdata
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(weakref.ref(storage, lambda _, key=key: self._gone(key)))
        num_bytes = storage.nbytes()
        if num_bytes != held.num_bytes:
            self._free(held)
            held.num_bytes = num_bytes
            if num_bytes:
                held.block = self._allocate(num_bytes, what)

    def ignore(self, tensor: torch.Tensor) -> None:
        """Takes a tensor that nothing has returned yet for one in other memory."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        reference = weakref.ref(storage, lambda _, key=key: self._gone(key))
        self._held[key] = _Held(reference, storage.nbytes())

    def disown(self, tensor: torch.Tensor) -> None:
        """The memory of a tensor is other memory, as it turns out."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is not None:
            self._free(held)

    def classify(self, tensor: torch.Tensor, memory: MemoryClass) -> None:
        """Says what the memory of a tensor is for, whatever it was taken for before."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is not None and held.block is not None:
            self._classes[held.block] = memory

    def _allocate(self, num_bytes: int, what: str) -> int:
        self._num_blocks += 1
        block = Allocate(self._num_blocks, num_bytes, self.stream, self.memory, what)
        self._alive[block.block] = block
        self.write(block)
        return block.block

    def _free(self, held: _Held) -> None:
        if held.block is not None:
            del self._alive[held.block]
            self.write(Free(held.block))
            held.block = None

    def _gone(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._free(held)

    def _classified(self, block: Allocate) -> Allocate:
        memory = self._classes.get(block.block)
        return block if memory is None else replace(block, memory=memory)
