"""Replays of small traces whose peaks follow from arithmetic."""

from __future__ import annotations

import json
import time

import pytest

from amalthea.plan.allocator import AllocatorSettings, replay
from amalthea.plan.allocator_pools import MIB
from amalthea.plan.events import COMPUTE, Allocate, Event, Free, HostMemory, Kernel, MemoryClass, Phase, Trace

UNCAPPED = AllocatorSettings()
GATHERED = 100 * MIB
"""Bytes of one group's parameters."""


def trace(*events: Event, resident: tuple[Allocate, ...] = ()) -> Trace:
    return Trace(rank=0, world_size=1, tokens=1, resident=resident, events=events)


def block(
    number: int, mib: float, stream: str = COMPUTE, memory: MemoryClass = "activations", what: str = ""
) -> Allocate:
    return Allocate(number, int(mib * MIB), stream, memory, what)


def test_the_peak_is_told_apart_by_class_stream_and_phase() -> None:
    found = replay(
        trace(
            Phase("forward", "blocks.0"),
            block(1, 30),
            block(2, 50, "gather", "gathered"),
            Free(2),
            Phase("forward", "blocks.1"),
            block(3, 60),
            Free(1),
            Phase("backward"),
            block(4, 10),
            resident=(block(0, 20, memory="parameters"),),
        ),
        settings=UNCAPPED,
    )
    allocated, reserved = found.demand.peak_allocated, found.demand.peak_reserved
    assert (allocated.event, allocated.phase) == (5, Phase("forward", "blocks.1"))
    assert allocated.by_class == {"parameters": 20 * MIB, "activations": 90 * MIB}
    assert allocated.allocated_bytes == 110 * MIB
    # The 50 MiB of the gathering stream are no use to the computing one.
    assert (reserved.event, reserved.reserved_bytes) == (5, 160 * MIB)
    assert reserved.by_stream["gather"].stranded_bytes == 50 * MIB
    assert reserved.by_stream[COMPUTE].stranded_bytes == 0
    assert reserved.stranded_bytes == 50 * MIB
    assert found.capped is None
    assert found.fits


def test_demand_cap_and_retries_are_told_apart() -> None:
    events = trace(block(1, 50, "gather"), Free(1), block(2, 60), Free(2), block(3, 30), block(4, 30))
    for cap_mib, reserved, retries in ((110, 110, 0), (100, 60, 1), (60, 60, 1)):
        found = replay(events, settings=AllocatorSettings(cap_gib=cap_mib / 1024))
        assert found.capped is not None
        assert found.demand.peak_reserved.reserved_bytes == 110 * MIB
        assert found.demand.num_retries == 0
        assert found.capped.peak_reserved.reserved_bytes == reserved * MIB
        assert found.capped.num_retries == retries
        assert found.fits


def test_out_of_memory_is_a_result_that_names_the_largest_holders() -> None:
    many = [block(number, 12, what="scores") for number in range(12)]
    kinds = [block(100 + number, 20 + 2 * number, memory="gradients", what=f"grad {number}") for number in range(11)]
    wanted = block(200, 60, "gather", "gathered", "all_gather")
    found = replay(
        trace(Phase("backward", "blocks.7"), *many, *kinds, wanted, Free(200)),
        settings=AllocatorSettings(cap_gib=0.5),
    )
    assert not found.fits
    assert found.capped is not None
    failure = found.capped.out_of_memory
    assert failure is not None
    assert failure.requested == wanted
    assert failure.moment.phase == Phase("backward", "blocks.7")
    assert failure.moment.event == 24
    assert failure.cap_bytes == 512 * MIB
    assert failure.moment.allocated_bytes == (12 * 12 + sum(20 + 2 * n for n in range(11))) * MIB
    assert len(failure.holders) == 10
    assert (failure.holders[0].what, failure.holders[0].num_blocks) == ("scores", 12)
    assert failure.holders[0].num_bytes == 144 * MIB
    assert [h.what for h in failure.holders[1:]] == [f"grad {number}" for number in range(10, 1, -1)]
    assert found.demand.out_of_memory is None
    assert found.demand.peak_allocated.allocated_bytes == failure.moment.allocated_bytes + 60 * MIB


def forward(num_groups: int, *, after_own_copy_out: bool) -> Trace:
    """FSDP2's forward: gather into one buffer, copy out into parameters, compute, free the parameters.

    The default gathers on a stream of its own, and frees a gathered buffer at the next group's wait;
    `unshard_async_op` gathers on the computing stream, and frees the buffer after its own copy-out.
    """
    events: list[Event] = []
    buffer: int | None = None
    for group in range(num_groups):
        gathered, parameters = 2 * group, 2 * group + 1
        events += [
            Phase("forward", f"blocks.{group}"),
            Allocate(gathered, GATHERED, COMPUTE if after_own_copy_out else "all_gather_copy_in", "gathered"),
        ]
        if buffer is not None:
            events.append(Free(buffer))
        events.append(Allocate(parameters, GATHERED, COMPUTE, "gathered"))
        if after_own_copy_out:
            events.append(Free(gathered))
        else:
            buffer = gathered
        events.append(Free(parameters))
    return trace(*events, *([] if buffer is None else [Free(buffer)]))


@pytest.mark.case(13)
@pytest.mark.parametrize("expandable", [False, True])
def test_fsdp_strands_a_gathered_buffer_that_unshard_async_op_does_not(expandable: bool) -> None:
    chosen = AllocatorSettings(expandable_segments=expandable)
    default = replay(forward(6, after_own_copy_out=False), settings=chosen).demand
    own = replay(forward(6, after_own_copy_out=True), settings=chosen).demand
    # At once: two gathered buffers, or one with its parameters.
    assert default.peak_allocated.allocated_bytes == own.peak_allocated.allocated_bytes == 2 * GATHERED
    # In all: two buffers on the gathering stream and parameters on the other, against two on the computing one.
    assert default.peak_reserved.reserved_bytes == 3 * GATHERED
    assert own.peak_reserved.reserved_bytes == 2 * GATHERED
    assert default.peak_reserved.by_stream["all_gather_copy_in"].reserved_bytes == 2 * GATHERED
    assert default.peak_reserved.stranded_bytes == GATHERED
    assert own.peak_reserved.stranded_bytes == 0


def test_later_steps_begin_with_what_the_first_left_cached() -> None:
    """9 MiB come from 20 of which 11 are left, while nothing is cached; later from 10, which fit better."""
    events = trace(block(1, 9), block(2, 11), block(3, 10), Free(1), Free(2), Free(3))
    peaks = [replay(events, settings=UNCAPPED, steps=steps).demand.peak_reserved for steps in (1, 2, 3)]
    assert [peak.reserved_bytes // MIB for peak in peaks] == [30, 40, 40]
    assert [peak.step for peak in peaks] == [0, 1, 1]
    assert replay(events, settings=AllocatorSettings(expandable_segments=True), steps=3).demand.peak_reserved.step == 0


def test_between_steps_resident_blocks_are_laid_anew_and_others_freed() -> None:
    moving = trace(block(1, 30), Free(0), block(2, 20), Free(1), resident=(block(0, 20),))
    found = replay(moving, settings=UNCAPPED, steps=3).demand
    assert found.peak_allocated.allocated_bytes == 50 * MIB
    assert found.peak_reserved.reserved_bytes == 50 * MIB


def test_host_memory_and_series() -> None:
    events: list[Event] = [HostMemory(100), HostMemory(50), HostMemory(-120), HostMemory(60)]
    for number in range(5000):
        events += [block(number, 2 + number % 7), Kernel("mm", COMPUTE, 1.0, 1, "bfloat16"), Free(number)]
    found = replay(trace(*events), settings=UNCAPPED)
    assert found.host_peak_bytes == 150
    series = found.demand.series
    assert 100 < len(series.events) <= 512
    assert list(series.events) == sorted(set(series.events))
    assert max(series.allocated_bytes) == found.demand.peak_allocated.allocated_bytes == 8 * MIB
    assert max(series.reserved_bytes) == 20 * MIB


def test_figures_that_leave_the_process_are_a_simulation() -> None:
    found = replay(trace(block(1, 8), block(2, 60, "gather")), settings=AllocatorSettings(cap_gib=40 / 1024))
    written = json.loads(json.dumps(found.to_json()))
    assert (written["figures_are"], written["fits"]) == ("simulation", False)
    assert written["demand"]["peak_reserved"]["by_stream"]["gather"]["reserved_bytes"] == 60 * MIB
    assert written["capped"]["out_of_memory"]["requested"]["num_bytes"] == 60 * MIB
    assert written["settings"]["cap_gib"] == 40 / 1024


def test_nothing_at_all_is_a_trace_too() -> None:
    found = replay(trace(), settings=AllocatorSettings(cap_gib=1))
    assert found.demand.peak_reserved.reserved_bytes == 0
    assert found.demand.series.events == ()
    assert found.fits


def test_a_trace_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="event 0 frees block 3, which is not there"):
        replay(trace(Free(3)), settings=UNCAPPED)
    with pytest.raises(ValueError, match="event 1 allocates block 1, which is there already"):
        replay(trace(block(1, 1), block(1, 1)), settings=UNCAPPED)


def test_three_hundred_thousand_events_take_seconds() -> None:
    """Bounded by processor time, so that a busy machine does not matter."""
    events: list[Event] = []
    for number in range(150_500):
        events.append(Allocate(number, 512 * (1 + number * 7919 % 90_000), f"stream {number % 3}", "activations"))
        if number >= 1000:
            events.append(Free(number - 1000))
    began = time.process_time()
    found = replay(trace(*events), settings=UNCAPPED)
    assert time.process_time() - began < 5
    assert found.demand.peak_reserved.reserved_bytes >= found.demand.peak_allocated.allocated_bytes
