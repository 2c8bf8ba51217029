"""What one rank does in one step, in the order in which its processor issues it.

A trace is a flat list of events. A *stream* is a name: work on one stream runs in the order issued; between streams
order comes from `Record` and `Wait` alone, as on a GPU. Memory belongs to the stream on which it was allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

COMPUTE = "compute"
"""The stream on which a model computes; the others are named after what runs there."""

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce"]
MemoryClass = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "recomputed",
    "boundaries",
    "communication",
    "other",
]


@dataclass(frozen=True)
class Phase:
    """Whatever follows belongs to this part of the step: ("forward", "blocks.3"), ("optimizer", "newton_schulz")."""

    name: str
    where: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} {self.where}".strip()


@dataclass(frozen=True)
class Kernel:
    """One operation. `flops` counts matrix products and attention (a multiply-add is two), `bytes_moved` what it reads
    and writes."""

    name: str
    stream: str
    flops: float
    bytes_moved: int
    dtype: str
    call: int = -1
    """Number in the trace's `calls`; -1 where these were not kept."""


@dataclass(frozen=True)
class Collective:
    """One collective, enqueued on `stream` (that of its process group); it starts after what `issued_from` holds.

    `ranks` are global; `bytes_out` is the payload of this rank: its shard for a gather, its whole input else.
    """

    kind: CollectiveKind
    axis: str
    ranks: tuple[int, ...]
    bytes_out: int
    stream: str
    issued_from: str
    dtype: str
    bytes_in: int = 0


class Exchange(NamedTuple):
    """What of a collective says how long it takes."""

    kind: CollectiveKind
    ranks: tuple[int, ...]
    bytes_out: int
    bytes_in: int


def exchange_of(event: Collective) -> Exchange:
    return Exchange(event.kind, event.ranks, event.bytes_out, event.bytes_in)


@dataclass(frozen=True)
class Copy:
    """A copy between the device and the host; `num_bytes` of one direction."""

    direction: Literal["to_host", "to_device"]
    num_bytes: int
    stream: str


@dataclass(frozen=True)
class Record:
    """Marks the point that `stream` has reached, as event number `event`."""

    event: int
    stream: str


@dataclass(frozen=True)
class Wait:
    """What `stream` does from here on starts after event number `event`."""

    event: int
    stream: str


@dataclass(frozen=True)
class Synchronize:
    """The processor itself waits for event number `event`, or for everything where it is none."""

    event: int | None = None


@dataclass(frozen=True)
class Allocate:
    """A block of device memory, `block` numbering it for the whole trace, on the pool of `stream`."""

    block: int
    num_bytes: int
    stream: str
    memory: MemoryClass
    what: str = ""
    """The operation or tensor that made it."""


@dataclass(frozen=True)
class Free:
    """The last reference to a block is gone; at once in order of issue, except for streams that recorded its use."""

    block: int


@dataclass(frozen=True)
class HostMemory:
    """A change of host memory held, in bytes."""

    num_bytes: int
    what: str = ""


Event = Phase | Kernel | Collective | Copy | Record | Wait | Synchronize | Allocate | Free | HostMemory


@dataclass(frozen=True)
class Trace:
    """One rank's step; `resident` are the blocks that are there before it and stay."""

    rank: int
    world_size: int
    tokens: int
    """Of this rank, in this step."""
    resident: tuple[Allocate, ...]
    events: tuple[Event, ...]
    calls: tuple[Any, ...] = ()
    """Different calls of operations (`plan/trace/calls.Call`), where they were asked for."""

    def peak_bytes(self, *, during: str | None = None) -> int:
        """Most bytes of live tensors, before an allocator rounds them: of the whole step, or of a phase by its name."""
        sizes = {block.block: block.num_bytes for block in self.resident}
        live = sum(sizes.values())
        phase: str | None = None
        peaks: dict[str | None, int] = {phase: live}
        for event in self.events:
            if isinstance(event, Phase):
                phase = event.name
            elif isinstance(event, Allocate):
                sizes[event.block] = event.num_bytes
                live += event.num_bytes
            elif isinstance(event, Free):
                live -= sizes.pop(event.block)
            for name in (phase, None):
                peaks[name] = max(peaks.get(name, 0), live)
        return peaks[during]
