"""Steps whose times follow from mental arithmetic, and random ones against a simulation that looks at every event."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timelines import ROUND, exact

from amalthea.core.errors import ConfigError
from amalthea.plan.clusters import get_cluster
from amalthea.plan.events import COMPUTE, Collective, Copy, Event, Kernel, Phase, Record, Synchronize, Trace, Wait
from amalthea.plan.step_speeds import KERNEL_CLASSES
from amalthea.plan.timeline import IN_LINE, Simulator, Timeline, Use, sensitivity, simulate

ONE_PER_NODE = (0, 2)


def trace(*events: Event, tokens: int = 1000) -> Trace:
    return Trace(rank=0, world_size=4, tokens=tokens, resident=(), events=events)


def compute(seconds: float, stream: str = COMPUTE) -> Kernel:
    """A matrix product on the round cluster."""
    return Kernel("mm", stream, seconds * 100e12, 0, "bfloat16")


def gather(seconds: float, stream: str = "all_gather", issued_from: str = COMPUTE, axis: str = "fsdp") -> Collective:
    """Over the network, between two nodes."""
    return Collective("all_gather", axis, ONE_PER_NODE, int(seconds * 10e9), stream, issued_from, "bfloat16")


def out(seconds: float) -> Copy:
    return Copy("to_host", int(seconds * 20e9), "copy out")


def back(seconds: float) -> Copy:
    return Copy("to_device", int(seconds * 20e9), "copy back")


def run(*events: Event, **changes: float) -> Timeline:
    return simulate(trace(*events), ROUND, assumptions=exact(**changes))


def test_kernels_of_a_stream_follow_one_another() -> None:
    found = run(compute(1), compute(2))
    assert found.step_s == pytest.approx(3)
    assert found.spans.start_s.tolist() == pytest.approx([0, 1])
    assert found.tokens_per_s_per_gpu == pytest.approx(1000 / 3)
    assert found.idle_s == pytest.approx(0)


def test_a_gather_that_nobody_waits_for_yet_is_hidden() -> None:
    found = run(gather(2), Record(1, "all_gather"), compute(3), Wait(1, COMPUTE), compute(1))
    assert found.step_s == pytest.approx(4)
    assert found.lanes["all_gather"] == Use(pytest.approx(2), pytest.approx(0))


def test_a_gather_that_is_waited_for_at_once_is_exposed() -> None:
    found = run(gather(2), Record(1, "all_gather"), Wait(1, COMPUTE), compute(3), gather(4), Record(2, "all_gather"))
    assert found.step_s == pytest.approx(9)
    # A collective starts after what the stream that issued it had to do.
    assert found.lanes["all_gather"] == Use(pytest.approx(6), pytest.approx(6))
    assert found.kinds["all_gather fsdp"].busy_s == pytest.approx(6)


def test_prefetching_a_group_ahead_hides_what_gathering_in_place_exposes() -> None:
    """Four groups of 3 s, gathers of 2 s each."""
    in_place: list[Event] = []
    ahead: list[Event] = [gather(2, issued_from="none"), Record(0, "all_gather")]
    for group in range(4):
        in_place += [gather(2), Record(group, "all_gather"), Wait(group, COMPUTE), compute(3)]
        ahead += [Wait(group, COMPUTE)]
        if group < 3:
            ahead += [gather(2, issued_from="none"), Record(group + 1, "all_gather")]
        ahead += [compute(3)]
    assert run(*in_place).step_s == pytest.approx(4 * (2 + 3))
    assert run(*ahead).step_s == pytest.approx(2 + 4 * 3)
    assert run(*ahead).lanes["all_gather"].exposed_s == pytest.approx(2)


def test_copies_of_both_directions_run_beside_each_other_and_block_who_waits() -> None:
    found = run(
        compute(1),
        Record(1, COMPUTE),
        Wait(1, "copy out"),
        out(4),
        back(2),
        Record(2, "copy out"),
        compute(1),
        Wait(2, COMPUTE),
        compute(1),
    )
    # 1 s of computing, 4 s of copying with 1 s of computing beside it, 1 s after.
    assert found.step_s == pytest.approx(6)
    assert found.lanes["copy out"] == Use(pytest.approx(4), pytest.approx(3))
    assert found.lanes["copy back"] == Use(pytest.approx(2), pytest.approx(0))
    assert found.kinds["to_device"].busy_s == pytest.approx(2)


def test_collectives_of_two_groups_share_a_link() -> None:
    both = run(gather(2, "a"), gather(2, "b"))
    assert both.step_s == pytest.approx(4)
    # The second joins after a second; from then on each has half: 1 + 2·1, and the other's last second alone.
    late = run(gather(2, "a"), compute(1), gather(2, "b"))
    assert late.spans.end_s.tolist() == pytest.approx([3, 1, 4])
    unequal = run(gather(1, "a"), gather(3, "b"))
    assert unequal.spans.end_s.tolist() == pytest.approx([2, 4])


def test_a_link_that_is_not_full_slows_nobody() -> None:
    """Inside a node and between nodes are different links."""
    inside = Collective("all_gather", "ep", (0, 1), int(2 * 100e9), "inside", COMPUTE, "bfloat16")
    assert run(gather(2), inside).step_s == pytest.approx(2)
    # Ranks on both nodes: 0.35 s of cards, and a tenth of the link inside, which another wants for 0.1 s.
    mixed = Collective("all_gather", "x", tuple(range(8)), 10**9, "mixed", COMPUTE, "bfloat16")
    found = simulate(replace(trace(mixed, replace(inside, bytes_out=10**10)), world_size=8), ROUND, assumptions=exact())
    # A tenth more is asked of the inner link than it has while both are under way, until the other's 0.1 s are done.
    assert found.spans.end_s.tolist() == pytest.approx([0.11 + (0.35 - 0.1), 0.11])


def test_latency_uses_no_link() -> None:
    found = run(gather(2, "a"), gather(2, "b"), collective_base_s=1.0)
    assert found.step_s == pytest.approx(5)
    assert run(gather(2, "a"), collective_base_s=1.0, network_hop_s=0.5).step_s == pytest.approx(3.5)


def test_the_processor_runs_ahead_until_it_cannot() -> None:
    """Launches of 1 s: kernels of 3 s hide them, kernels of 0.1 s do not."""
    long = run(*[compute(3)] * 4, launch_s=1.0)
    assert long.step_s == pytest.approx(1 + 4 * 3)
    assert long.idle_s == pytest.approx(1)
    short = run(*[compute(0.1)] * 4, launch_s=1.0)
    assert short.step_s == pytest.approx(4.1)
    assert short.idle_s == pytest.approx(4.1 - 0.4)
    assert short.issuing_s == pytest.approx(4)


def test_waiting_for_the_device_costs_the_lead() -> None:
    lead = (compute(3), compute(0.5), compute(0.5))
    assert run(*lead, launch_s=1.0).step_s == pytest.approx(1 + 3 + 0.5 + 0.5)
    # Known at 4 s; two launches follow, one after the other.
    waiting = (compute(3), Record(1, COMPUTE), Synchronize(1), compute(0.5), compute(0.5))
    assert run(*waiting, launch_s=1.0).step_s == pytest.approx(4 + 1 + 1 + 0.5)
    everything = (compute(3), out(5), Synchronize(), compute(1))
    assert run(*everything).step_s == pytest.approx(6)
    assert run(compute(1), out(5), Record(1, COMPUTE), Synchronize(1), compute(1)).step_s == pytest.approx(5)


def test_an_event_carries_what_its_stream_waited_for() -> None:
    """Compute waits for a stream that itself only waited."""
    found = run(out(4), Record(1, "copy out"), Wait(1, "middle"), Record(2, "middle"), Wait(2, COMPUTE), compute(1))
    assert found.step_s == pytest.approx(5)


def test_waiting_for_what_was_before_the_trace_is_no_wait() -> None:
    assert run(Wait(99, COMPUTE), compute(1)).step_s == pytest.approx(1)


def test_a_collective_on_the_stream_that_issues_it_is_in_its_order() -> None:
    found = run(compute(1), gather(2, COMPUTE), compute(1))
    assert found.spans.end_s.tolist() == pytest.approx([1, 3, 4])
    assert found.lanes == {COMPUTE: Use(pytest.approx(2), 0), IN_LINE: Use(pytest.approx(2), pytest.approx(2))}


def test_phases_add_up_to_the_step() -> None:
    found = run(
        Phase("forward", "blocks.0"),
        gather(2),
        Record(1, "all_gather"),
        Wait(1, COMPUTE),
        compute(3),
        Phase("forward", "blocks.1"),
        compute(1),
        Phase("optimizer", "newton_schulz"),
        compute(2),
        Record(2, COMPUTE),
        Wait(2, "copy out"),
        Phase("optimizer", "finish"),
        out(4),
    )
    phases = found.phases
    assert found.step_s == pytest.approx(12)
    assert list(phases) == ["forward", "optimizer.newton_schulz", "optimizer.finish"]
    assert phases["forward"].seconds == pytest.approx(6)
    assert phases["forward"].compute_s == pytest.approx(4)
    assert phases["forward"].exposed_s == {"all_gather": pytest.approx(2)}
    assert sum(phase.seconds for phase in phases.values()) == pytest.approx(found.step_s)
    assert phases["optimizer.finish"].exposed_s == {"copy out": pytest.approx(4)}
    assert sum(p.compute_s + sum(p.exposed_s.values()) + p.idle_s for p in phases.values()) == pytest.approx(12)


def test_utilisation_counts_the_models_flop_and_what_was_carried_out() -> None:
    events = (Phase("forward"), compute(1), gather(3), Record(1, "all_gather"), Wait(1, COMPUTE), compute(1))
    optimizer = (Phase("optimizer", "newton_schulz"), compute(5))
    found = simulate(trace(*events, *optimizer), ROUND, assumptions=exact(), model_flops_per_token=1e11)
    assert found.step_s == pytest.approx(10)
    assert found.hfu == pytest.approx(2 / 10)
    assert found.mfu == pytest.approx(1000 * 1e11 / (10 * 100e12))
    assert found.kinds["newton_schulz"].busy_s == pytest.approx(5)
    assert run(*events).mfu is None
    assert KERNEL_CLASSES[found.spans.kernel_class[0]] == "matmul"


def test_sensitivity_ranks_what_the_step_rests_on() -> None:
    events = trace(compute(1), gather(10), Record(1, "all_gather"), Wait(1, COMPUTE), compute(1))
    found = sensitivity(events, ROUND, assumptions=exact())
    assert found[0].assumption == "network"
    assert found[0].step_s_lower == pytest.approx(2 + 10 / 0.9)
    assert found[0].step_s_higher == pytest.approx(2 + 10 / 1.1)
    by_name = {one.assumption: one for one in found}
    assert by_name["matmul"].step_s_lower == pytest.approx(10 + 2 / 0.9)
    assert by_name["attention"].swing_s == 0


def test_figures_that_leave_the_process_are_a_simulation() -> None:
    found = run(compute(1)).to_json()
    assert found["figures_are"] == "simulation"
    assert found["step_s"] == pytest.approx(1)
    assert any(line.startswith("matmul = 1 ") for line in found["assumptions"])


def test_a_cluster_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than 99,999"):
        simulate(replace(trace(compute(1)), world_size=99_999), get_cluster("jupiter"))


def test_nothing_takes_no_time() -> None:
    assert run().step_s == 0
    assert run().lanes == {COMPUTE: Use(0, 0)}


WORK = st.one_of(
    st.tuples(st.just("kernel"), st.sampled_from((COMPUTE, "side")), st.integers(1, 30)),
    st.tuples(st.just("gather"), st.sampled_from((COMPUTE, "side")), st.integers(1, 30)),
    st.tuples(st.just("out"), st.just(""), st.integers(1, 30)),
    st.tuples(st.just("back"), st.just(""), st.integers(1, 30)),
    st.tuples(st.just("record"), st.sampled_from((COMPUTE, "side", "all_gather", "copy out", "copy back")), st.just(0)),
    st.tuples(
        st.just("wait"),
        st.sampled_from((COMPUTE, "side", "all_gather", "copy out", "copy back")),
        st.integers(0, 5),
    ),
    st.tuples(st.just("sync"), st.just(""), st.integers(0, 5)),
)


def as_events(work: list[tuple[str, str, int]]) -> list[Event]:
    events: list[Event] = []
    recorded = 0
    for kind, stream, number in work:
        if kind == "kernel":
            events.append(compute(number / 10, stream))
        elif kind == "gather":
            events.append(gather(number / 10, issued_from=stream))
        elif kind in ("out", "back"):
            events.append((out if kind == "out" else back)(number / 10))
        elif kind == "record":
            events.append(Record(recorded, stream))
            recorded += 1
        elif kind == "wait":
            events.append(Wait(recorded - 1 - number, stream))
        else:
            events.append(Synchronize(recorded - number if number else None))
    return events


def one_by_one(events: list[Event], launch_s: float) -> tuple[float, list[float]]:
    """The same rules, event after event; right where no two transfers can meet on a link."""
    now, reached, marks, ends = 0.0, dict[str, float](), dict[int, float](), list[float]()
    for event in events:
        if isinstance(event, Record):
            marks[event.event] = reached.get(event.stream, 0.0)
        elif isinstance(event, Wait):
            reached[event.stream] = max(reached.get(event.stream, 0.0), marks.get(event.event, 0.0))
        elif isinstance(event, Synchronize):
            done = max(reached.values(), default=0.0) if event.event is None else marks.get(event.event, 0.0)
            now = max(now, done)
        elif isinstance(event, (Kernel, Collective, Copy)):
            now += launch_s
            begin = max(now, reached.get(event.stream, 0.0))
            if isinstance(event, Collective):
                begin = max(begin, reached.get(event.issued_from, 0.0))
                begin += event.bytes_out / 10e9
            else:
                begin += event.flops / 100e12 if isinstance(event, Kernel) else event.num_bytes / 20e9
            reached[event.stream] = begin
            ends.append(begin)
    return max([now, *ends]), ends


@settings(max_examples=120, deadline=None)
@given(work=st.lists(WORK, max_size=40), launch=st.sampled_from((0.0, 0.05, 0.7)))
def test_runs_of_kernels_end_when_each_kernel_does(work: list[tuple[str, str, int]], launch: float) -> None:
    events = as_events(work)
    found = run(*events, launch_s=launch)
    step_s, ends = one_by_one(events, launch)
    assert found.spans.end_s.tolist() == pytest.approx(ends, abs=1e-8)
    assert found.step_s == pytest.approx(step_s, abs=1e-8)
    computing = found.lanes[COMPUTE]
    parts = found.phases.values()
    if parts:
        assert sum(part.seconds for part in parts) == pytest.approx(found.step_s)
    assert computing.busy_s + found.idle_s <= found.step_s + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=8),
)
def test_a_shared_link_carries_everything_in_the_time_that_the_bytes_take(sizes: list[tuple[int, int]]) -> None:
    """However transfers overlap, the link works without a break while there is something to send."""
    events: list[Event] = []
    for index, (seconds, pause) in enumerate(sizes):
        events += [compute(pause / 10), gather(seconds / 10, f"group {index}")]
    found = run(*events)
    arrivals, arrived = [], 0.0
    for seconds, pause in sizes:
        arrived += pause / 10
        arrivals.append((arrived, seconds / 10))
    free = 0.0
    for start, seconds in arrivals:
        free = max(free, start) + seconds
    assert found.step_s == pytest.approx(max(free, arrived))


def test_three_hundred_thousand_events_take_seconds() -> None:
    """Bounded by processor time, so that a busy machine does not matter."""
    events: list[Event] = []
    for group in range(300):
        events += [gather(0.01), Record(group, "all_gather"), Wait(group, COMPUTE), *[compute(1e-5)] * 997]
    began = time.process_time()
    found = run(*events)
    assert time.process_time() - began < 8
    assert len(events) == 300_000
    assert found.step_s == pytest.approx(300 * (0.01 + 997e-5))


def test_other_assumptions_do_not_read_the_trace_again() -> None:
    simulator = Simulator(trace(compute(1), gather(1)), ROUND)
    assert simulator.step_s(exact()) == pytest.approx(2)
    assert simulator.step_s(exact(matmul=0.5)) == pytest.approx(3)
