"""Whether the allocator retries under the cap: FSDP2's own streams, and `unshard_async_op`, on one layout.

FSDP2 gathers into buffers of a stream of its own; what that stream's pool has reserved, the computing stream cannot
use. Where both together ask for more than there is, the allocator waits for the device, gives back all that it caches,
and asks again: a retry, in every step anew. `unshard_async_op` gathers into the computing stream's pool. The published
run saw its retries go with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from amalthea.config.overrides import apply_overrides
from amalthea.config.run import RunConfig
from amalthea.core.units import GIB
from amalthea.plan.allocator import AllocatorSettings, Usage, replay
from amalthea.plan.events import COMPUTE, Trace
from amalthea.plan.setting import Code, Setting

STEPS = 3
"""The first finds nothing cached; from the second on each is like the one before."""


@dataclass(frozen=True)
class Retries:
    """Steps of one layout, with one of the two ways to gather and one kind of segments. A *simulation*."""

    unshard_async_op: bool
    expandable_segments: bool
    allocated_bytes: int
    """The peak, without a cap."""
    reserved_bytes: int
    """The same, reserved."""
    elsewhere_bytes: int
    """Of those, in pools of other streams than the computing one."""
    by_step: tuple[int, ...]
    """Under the cap, of each step that began."""
    runs_out: bool
    """Of memory, under the cap, however often it retries."""

    def to_json(self) -> dict[str, Any]:
        return {
            "unshard_async_op": self.unshard_async_op,
            "expandable_segments": self.expandable_segments,
            "allocated_gib": self.allocated_bytes / GIB,
            "reserved_gib": self.reserved_bytes / GIB,
            "reserved_on_other_streams_gib": self.elsewhere_bytes / GIB,
            "retries_by_step": list(self.by_step),
            "runs_out": self.runs_out,
        }


@dataclass(frozen=True)
class RetryCheck:
    """Both ways to gather, with and without expandable segments, on one layout under one cap."""

    overrides: tuple[str, ...]
    cap_gib: float
    rows: tuple[Retries, ...]

    @property
    def verdict(self) -> tuple[str, ...]:
        """In words, for each kind of segments."""
        return tuple(self._says(expandable) for expandable in (True, False))

    def _says(self, expandable: bool) -> str:
        default, own = (self._row(expandable, is_async) for is_async in (False, True))
        segments = "expandable segments" if expandable else "default segments"
        said = f"{segments}, {STEPS} steps under {self.cap_gib:.1f} GiB: {_count(default)} with FSDP2's streams, "
        said += f"{_count(own)} with unshard_async_op"
        low, high = own.reserved_bytes / GIB, default.reserved_bytes / GIB
        if low < high:
            return f"{said}; any cap from {low:.1f} to {high:.1f} GiB tells the two apart"
        return f"{said}; FSDP2's streams demand no more"

    def _row(self, expandable: bool, is_async: bool) -> Retries:
        wanted = (expandable, is_async)
        return next(row for row in self.rows if (row.expandable_segments, row.unshard_async_op) == wanted)

    def to_json(self) -> dict[str, Any]:
        return {
            "figures_are": "simulation",
            "overrides": list(self.overrides),
            "cap_gib": self.cap_gib,
            "rows": [row.to_json() for row in self.rows],
            "verdict": list(self.verdict),
        }


def check_retries(
    reference: RunConfig,
    overrides: tuple[str, ...],
    setting: Setting,
    code: Code,
    *,
    say: Callable[[str], None] = lambda text: None,
) -> RetryCheck:
    """Traces `reference` with `overrides`, both ways, and replays them under the setting's cap.

    Raises ConfigError as `plan_run` does. Communication: none. Time: about 25 s of one core for 74 layers.
    """
    traces: dict[bool, Trace] = {}
    for is_async in (False, True):
        say(f"check retries, {'unshard_async_op' if is_async else 'FSDP2 streams'}")
        changed = apply_overrides(reference, (*overrides, f"memory.unshard_async_op={str(is_async).lower()}"))
        traces[is_async] = setting.trace(changed, code)
    cap_gib = setting.allocator.cap_gib
    assert cap_gib is not None
    return RetryCheck(overrides, cap_gib, count_retries(traces, setting.allocator))


def count_retries(traces: Mapping[bool, Trace], settings: AllocatorSettings) -> tuple[Retries, ...]:
    """Replays each trace, by its `unshard_async_op`, with and without expandable segments."""
    return tuple(
        _retries(trace, replace(settings, expandable_segments=expandable), is_async)
        for expandable in (True, False)
        for is_async, trace in traces.items()
    )


def _retries(trace: Trace, settings: AllocatorSettings, is_async: bool) -> Retries:
    replayed = replay(trace, settings=settings, steps=STEPS)
    demand, capped = replayed.demand, replayed.capped or replayed.demand
    return Retries(
        unshard_async_op=is_async,
        expandable_segments=settings.expandable_segments,
        allocated_bytes=demand.peak_allocated.allocated_bytes,
        reserved_bytes=demand.peak_reserved.reserved_bytes,
        elsewhere_bytes=_elsewhere(demand),
        by_step=capped.retries_by_step,
        runs_out=capped.out_of_memory is not None,
    )


def _elsewhere(usage: Usage) -> int:
    streams = usage.peak_reserved.by_stream.items()
    return sum(held.reserved_bytes for stream, held in streams if stream != COMPUTE)


def _count(row: Retries) -> str:
    count, steps = sum(row.by_step), " + ".join(map(str, row.by_step))
    retries = f"{count} {'retry' if count == 1 else 'retries'} ({steps})" if count else "no retry"
    return f"{retries} and then out of memory" if row.runs_out else retries
