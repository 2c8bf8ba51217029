"""Replays a trace through a model of PyTorch's caching allocator: what a step allocates, reserves and strands.

Two questions are kept apart: what the step *demands*, with memory without limit; and what happens under a *cap*, where
the allocator first gives back what it caches (a *retry*, which waits for the device) and then runs out of memory.
The result is a simulation. Bytes are as the allocator counts them: rounded, with what a block is larger than asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from amalthea.plan.allocator_pools import AllocatorSettings, Block, CachingAllocator
from amalthea.plan.events import Allocate, Free, HostMemory, Phase, Trace

__all__ = ["AllocatorSettings", "Holder", "MemoryReplay", "Moment", "OutOfMemory", "StreamMemory", "Usage", "replay"]

BEFORE = Phase("before the step")
_LARGEST = 10
_POINTS = 512


@dataclass(frozen=True)
class StreamMemory:
    """Bytes of one stream's pools."""

    reserved_bytes: int
    allocated_bytes: int

    @property
    def stranded_bytes(self) -> int:
        """Reserved and free: only this stream can use it, until everything cached is given back."""
        return self.reserved_bytes - self.allocated_bytes


@dataclass(frozen=True)
class Moment:
    """The state after one event."""

    step: int
    """Which repetition of the trace, from 0."""
    event: int
    """Index in the trace's events; -1 before the first."""
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int
    by_class: dict[str, int]
    """Allocated bytes by memory class."""
    by_stream: dict[str, StreamMemory]

    @property
    def stranded_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes

    @property
    def pass_bytes(self) -> int:
        """Allocated for activations, kept or recomputed, which grow with the tokens of a pass."""
        return self.by_class.get("recomputed", 0) + self.by_class.get("activations", 0)


@dataclass(frozen=True)
class Holder:
    """Blocks of one kind that are alive together; bytes as asked for."""

    memory: str
    what: str
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True)
class OutOfMemory:
    """The request that could not be met, and who held memory then."""

    moment: Moment
    requested: Allocate
    cap_bytes: int
    holders: tuple[Holder, ...]
    """The ten largest."""


@dataclass(frozen=True)
class Series:
    """Allocated and reserved bytes over the events, the largest of each stretch; `events` counts through all steps."""

    events: tuple[int, ...]
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Usage:
    """One pass through the trace."""

    peak_allocated: Moment
    peak_reserved: Moment
    holders: tuple[Holder, ...]
    """The ten largest when most was allocated."""
    num_retries: int
    retries_by_step: tuple[int, ...]
    """Of each repetition of the trace that began."""
    num_device_allocations: int
    out_of_memory: OutOfMemory | None
    series: Series


@dataclass(frozen=True)
class MemoryReplay:
    """What the step demands, and what it does under the cap; `replay` makes it."""

    settings: AllocatorSettings
    demand: Usage
    """Without a cap."""
    capped: Usage | None
    """Under the cap; none where there is none."""
    host_peak_bytes: int

    @property
    def fits(self) -> bool:
        """Under the cap nothing ran out of memory; retries may have been needed."""
        return self.capped is None or self.capped.out_of_memory is None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain dictionaries, ready for `json.dumps`."""
        return {"figures_are": "simulation", "fits": self.fits, **asdict(self)}


def replay(trace: Trace, *, settings: AllocatorSettings, steps: int = 1) -> MemoryReplay:
    """Replays `trace` with fresh pools, its events `steps` times.

    Later steps start from what the first left cached. What a step leaves allocated beyond the resident blocks is freed
    at its end. Running out of memory is a result, `capped.out_of_memory`, not an error.
    Raises ValueError for a trace that frees what is not there. Time: about a second for 300,000 events.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps")
    demand = _Pass(trace, replace(settings, cap_gib=None, garbage_collection_threshold=None)).run(steps)
    capped = None
    if settings.cap_bytes is not None:
        same = demand.peak_reserved.reserved_bytes <= settings.cap_bytes
        collects = settings.garbage_collection_threshold is not None
        capped = demand if same and not collects else _Pass(trace, settings).run(steps)
    return MemoryReplay(settings, demand, capped, _host_peak(trace))


class _Pass:
    """One replay under way."""

    def __init__(self, trace: Trace, settings: AllocatorSettings) -> None:
        self.trace = trace
        self.settings = settings
        self.allocator = CachingAllocator(settings)
        self.step, self.phase = 0, BEFORE
        self.live: dict[int, tuple[Block, Allocate]] = {}
        self.by_class: Counter[str] = Counter()
        self.peak_allocated = self.peak_reserved = self._moment(-1, BEFORE)
        self._rising: tuple[int, Phase] | None = None
        """Where allocated memory last reached a new height, until that is written down."""
        self._height = 0

    def run(self, steps: int) -> Usage:
        series = _Sampler(steps * len(self.trace.events))
        failure = self._allocate_all(self.trace.resident)
        retries: list[int] = []
        while failure is None and self.step < steps:
            before = self.allocator.num_retries
            failure = self._step(series) or self._restore()
            retries.append(self.allocator.num_retries - before)
            self.step += 1
        self._write_peak()
        return Usage(
            peak_allocated=self.peak_allocated,
            peak_reserved=self.peak_reserved,
            holders=_largest(_live_after(self.trace, self.peak_allocated.event)),
            num_retries=self.allocator.num_retries,
            retries_by_step=tuple(retries),
            num_device_allocations=self.allocator.num_device_allocations,
            out_of_memory=failure,
            series=series.series(),
        )

    def _step(self, series: _Sampler) -> OutOfMemory | None:
        allocator = self.allocator
        offset = self.step * len(self.trace.events)
        for index, event in enumerate(self.trace.events):
            if isinstance(event, Allocate):
                if failure := self._allocate(index, event):
                    return failure
            elif isinstance(event, Free):
                self._free(index, event.block)
            elif isinstance(event, Phase):
                self.phase = event
                continue
            else:
                continue
            series.add(offset + index, allocator.allocated, allocator.reserved)
        return None

    def _allocate_all(self, requests: Iterable[Allocate]) -> OutOfMemory | None:
        """Outside the events: before the first step, or between two."""
        self.phase = BEFORE
        for request in requests:
            if failure := self._allocate(-1, request):
                return failure
        return None

    def _restore(self) -> OutOfMemory | None:
        """Leaves allocated what was so before the step."""
        resident = {request.block: request for request in self.trace.resident}
        for block in [block for block in self.live if block not in resident]:
            self._free(-1, block)
        return self._allocate_all(request for block, request in resident.items() if block not in self.live)

    def _allocate(self, index: int, request: Allocate) -> OutOfMemory | None:
        allocator, reserved = self.allocator, self.allocator.reserved
        if request.block in self.live:
            raise ValueError(f"event {index} allocates block {request.block}, which is there already")
        block = allocator.allocate(request.num_bytes, request.stream)
        if block is None:
            cap = self.settings.cap_bytes
            assert cap is not None
            holders = _largest(held for _, held in self.live.values())
            return OutOfMemory(self._moment(index, self.phase), request, cap, holders)
        self.live[request.block] = block, request
        self.by_class[request.memory] += block.size
        if allocator.allocated > self._height:
            self._height = allocator.allocated
            self._rising = index, self.phase
        if reserved < allocator.reserved > self.peak_reserved.reserved_bytes:
            self.peak_reserved = self._moment(index, self.phase)
        return None

    def _free(self, index: int, number: int) -> None:
        if number not in self.live:
            raise ValueError(f"event {index} frees block {number}, which is not there")
        if self._rising is not None:
            self._write_peak()
        block, request = self.live.pop(number)
        self.by_class[request.memory] -= block.size
        self.allocator.release(block)

    def _write_peak(self) -> None:
        """Called before anything is freed, so the state is still that of the height."""
        if self._rising is not None:
            self.peak_allocated = self._moment(*self._rising)
            self._rising = None

    def _moment(self, event: int, phase: Phase) -> Moment:
        by_stream: dict[str, StreamMemory] = {}
        for pool in self.allocator.pools.values():
            other = by_stream.get(pool.stream, StreamMemory(0, 0))
            by_stream[pool.stream] = StreamMemory(
                pool.reserved + other.reserved_bytes, pool.allocated + other.allocated_bytes
            )
        return Moment(
            step=self.step,
            event=event,
            phase=phase,
            allocated_bytes=self.allocator.allocated,
            reserved_bytes=self.allocator.reserved,
            by_class={memory: num_bytes for memory, num_bytes in self.by_class.items() if num_bytes},
            by_stream=by_stream,
        )


class _Sampler:
    """Keeps the largest figures of each of at most `_POINTS` stretches."""

    def __init__(self, num_events: int) -> None:
        self._events_per_point = max(1, -(-num_events // _POINTS))
        self._points: dict[int, tuple[int, int]] = {}

    def add(self, event: int, allocated: int, reserved: int) -> None:
        point = event // self._events_per_point
        before = self._points.get(point)
        if before is None:
            self._points[point] = allocated, reserved
        elif allocated > before[0] or reserved > before[1]:
            self._points[point] = max(allocated, before[0]), max(reserved, before[1])

    def series(self) -> Series:
        events = tuple(point * self._events_per_point for point in self._points)
        allocated, reserved = zip(*self._points.values(), strict=True) if self._points else ((), ())
        return Series(events, allocated, reserved)


def _live_after(trace: Trace, event: int) -> Iterable[Allocate]:
    live = {request.block: request for request in trace.resident}
    for earlier in trace.events[: event + 1]:
        if isinstance(earlier, Allocate):
            live[earlier.block] = earlier
        elif isinstance(earlier, Free):
            live.pop(earlier.block, None)
    return live.values()


def _largest(requests: Iterable[Allocate]) -> tuple[Holder, ...]:
    held: dict[tuple[str, str], list[int]] = {}
    for request in requests:
        held.setdefault((request.memory, request.what), []).append(request.num_bytes)
    holders = [Holder(memory, what, len(sizes), sum(sizes)) for (memory, what), sizes in held.items()]
    return tuple(sorted(holders, key=lambda holder: -holder.num_bytes)[:_LARGEST])


def _host_peak(trace: Trace) -> int:
    held = peak = 0
    for event in trace.events:
        if isinstance(event, HostMemory):
            held += event.num_bytes
            peak = max(peak, held)
    return peak
