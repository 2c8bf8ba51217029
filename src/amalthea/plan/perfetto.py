"""A timeline as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing show.

Streams are threads, with one more for the parts of the step. Memory is a counter: the allocator's state changes as the
processor issues, ahead of the device, and is drawn where the computing stream gets there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from amalthea.core.units import GIB, format_si
from amalthea.plan.allocator import MemoryReplay, Series
from amalthea.plan.events import Collective, Copy, Kernel, Phase, Trace
from amalthea.plan.step_speeds import KERNEL_CLASSES
from amalthea.plan.timeline import Timeline, Work, compute_reaches, transfer_kind, work_of

_PARTS = "parts of the step"


def write_chrome_trace(path: Path, trace: Trace, timeline: Timeline, *, memory: MemoryReplay | None = None) -> None:
    """Writes `timeline`, which must be `trace`'s, and the memory of its first step.

    About 160 bytes per kernel, or 9 where `path` ends in `.gz`, which viewers open as they do the plain file.
    """
    with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, entry in enumerate(_entries(trace, timeline, memory)):
            file.write((",\n" if number else "") + json.dumps(entry))
        file.write("\n]}\n")


def _entries(trace: Trace, timeline: Timeline, memory: MemoryReplay | None) -> Iterator[dict[str, Any]]:
    work = work_of(trace, timeline.spans)
    lanes = {name: number for number, name in enumerate(dict.fromkeys((_PARTS, *(event.stream for event in work))))}
    yield _named("process_name", trace.rank, 0, f"rank {trace.rank} of {trace.world_size}, simulated")
    for name, number in lanes.items():
        yield _named("thread_name", trace.rank, number, name)
    yield from _parts(trace, timeline)
    spans = timeline.spans
    columns = (spans.start_s, spans.end_s, spans.kernel_class)
    for event, start, end, number in zip(work, *(column.tolist() for column in columns), strict=True):
        name = event.name if isinstance(event, Kernel) else transfer_kind(event)
        yield _slice(trace.rank, lanes[event.stream], name, start, end) | _details(event, number)
    if memory is not None:
        yield from _memory(trace, timeline, (memory.capped or memory.demand).series)


def _parts(trace: Trace, timeline: Timeline) -> Iterator[dict[str, Any]]:
    found = [(index, event) for index, event in enumerate(trace.events) if isinstance(event, Phase)]
    starts = compute_reaches(trace, timeline.spans, np.array([index for index, _ in found], dtype=np.int64)).tolist()
    for (_, phase), start, end in zip(found, starts, [*starts[1:], timeline.step_s], strict=True):
        if end > start:
            yield _slice(trace.rank, 0, phase.label, start, end)


def _memory(trace: Trace, timeline: Timeline, series: Series) -> Iterator[dict[str, Any]]:
    events = np.array([event for event in series.events if event < len(trace.events)], dtype=np.int64)
    times = compute_reaches(trace, timeline.spans, events).tolist()
    for time, allocated, reserved in zip(times, series.allocated_bytes, series.reserved_bytes, strict=False):
        values = {"allocated": round(allocated / GIB, 4), "stranded": round((reserved - allocated) / GIB, 4)}
        yield {"ph": "C", "pid": trace.rank, "name": "memory, GiB", "ts": _ns(time) / 1000, "args": values}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def _slice(process: int, thread: int, name: str, start: float, end: float) -> dict[str, Any]:
    # Ends are rounded, not lengths: neighbours that overlap by a nanosecond would be drawn one inside the other.
    first, last = _ns(start), _ns(end)
    times = {"ts": first / 1000, "dur": (last - first) / 1000}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **times}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _details(event: Work, number: int) -> dict[str, Any]:
    if isinstance(event, Collective):
        args = {"bytes": format_si(event.bytes_out, "B"), "ranks": len(event.ranks), "dtype": event.dtype}
    elif isinstance(event, Copy):
        args = {"bytes": format_si(event.num_bytes, "B")}
    else:
        args = {"class": KERNEL_CLASSES[number], "bytes": format_si(event.bytes_moved, "B"), "dtype": event.dtype}
        args |= {"flop": format_si(event.flops, "FLOP")} if event.flops else {}
    return {"args": args}
