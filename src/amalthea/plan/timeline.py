"""How long a step takes on a described cluster: a *simulation* of its trace.

Every stream is a lane in which work runs in order; collectives that were put on the computing stream itself count as
a lane of their own, since nothing computes meanwhile. What a kernel or collective waits for follows from the trace:
its stream, waits for events of other streams, and the processor, which launches one thing after the other and runs
ahead until it must wait for the device. Collectives and copies that are under way together share their links.

Left out: kernels of different streams slowing one another down, multiprocessors and memory bandwidth that collectives
take from the computation, other ranks being late, and the processor's own work but launching.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from amalthea.plan.clusters import Cluster
from amalthea.plan.events import COMPUTE, Collective, Copy, Event, Exchange, Kernel, Phase, Trace, exchange_of
from amalthea.plan.network import Reach, Transfer, price_collective, price_copy, reach
from amalthea.plan.step_speeds import KERNEL_CLASSES, Assumptions, Floats, Ints, StepSpeeds
from amalthea.plan.timeline_clock import Clock, run_clock
from amalthea.plan.timeline_graph import Graph, build_graph, run_times
from amalthea.plan.timeline_use import Intervals, union

Work = Kernel | Collective | Copy
IN_LINE = "in line with compute"


@dataclass(frozen=True)
class Use:
    """Seconds in which something runs, and those of them in which nothing computes."""

    busy_s: float
    exposed_s: float


@dataclass(frozen=True)
class PhaseUse:
    """Seconds of a part of the step, as the computing stream passes through it; `exposed_s` by lane, and lanes may be
    exposed at once."""

    seconds: float
    compute_s: float
    exposed_s: dict[str, float]
    idle_s: float
    """Nothing runs on the device: the processor is late, or waits."""


@dataclass(frozen=True)
class Spans:
    """When each kernel, collective and copy ran, in order of issue, by column: its event, seconds from the start."""

    event: Ints
    start_s: Floats
    end_s: Floats
    kernel_class: Ints
    """Number in KERNEL_CLASSES; -1 for collectives and copies."""


@dataclass(frozen=True)
class Timeline:
    """One step; `simulate` makes it."""

    cluster: Cluster
    assumptions: Assumptions
    step_s: float
    tokens_per_s_per_gpu: float
    hfu: float
    """FLOP carried out before the optimizer, recomputed ones too, over what the GPU could do at its bf16 peak."""
    mfu: float | None
    """The same with the model's FLOP; none where these were not given."""
    lanes: dict[str, Use]
    """By stream, collectives and copies on the computing stream under IN_LINE."""
    kinds: dict[str, Use]
    """By kind of kernel, collective with its axis, and direction of copy."""
    phases: dict[str, PhaseUse]
    """By part of the step, in order; parts that are numbered (blocks) count as one."""
    idle_s: float
    issuing_s: float
    """Of the processor, launching."""
    spans: Spans
    clocked: Clocked | None = None
    """What was measured instead of assumed."""

    @property
    def compute_s(self) -> float:
        """Seconds in which kernels run on the computing stream."""
        return self.lanes[COMPUTE].busy_s

    @property
    def optimizer_s(self) -> float:
        """Of the step."""
        return sum(use.seconds for name, use in self.phases.items() if name.startswith("optimizer"))

    @property
    def exposed_comm_s(self) -> float:
        """Seconds of the step in which nothing computes while anything is sent or copied, counted once."""
        return max(0.0, self.step_s - self.compute_s - self.idle_s)

    @property
    def transfers(self) -> dict[str, Use]:
        """`kinds` that are sent or copied; they may be exposed at once."""
        return {name: use for name, use in self.kinds.items() if name not in KERNEL_CLASSES}

    def to_json(self) -> dict[str, Any]:
        """Everything but the spans, ready for `json.dumps`."""
        return {
            "figures_are": "simulation",
            "cluster": self.cluster.name,
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "hfu": self.hfu,
            "mfu": self.mfu,
            "idle_s": self.idle_s,
            "issuing_s": self.issuing_s,
            "lanes": {name: vars(use) for name, use in self.lanes.items()},
            "kinds": {name: vars(use) for name, use in self.kinds.items()},
            "phases": {name: vars(use) for name, use in self.phases.items()},
            "assumptions": list((self.clocked or self.assumptions).lines()),
        }


@dataclass(frozen=True)
class Sensitivity:
    """What the step becomes where one assumption is lower or higher."""

    assumption: str
    value: float
    step_s_lower: float
    step_s_higher: float

    @property
    def swing_s(self) -> float:
        return abs(self.step_s_higher - self.step_s_lower)


@dataclass(frozen=True)
class Clocked:
    """Seconds that were measured on the machine itself (`plan/stopwatch.py`), of a trace's calls and collectives."""

    call_s: tuple[float, ...]
    """By number of the call."""
    exchange_s: dict[Exchange, float]
    overhead_s: float
    """For each operation, where the processor that issues it also carries it out; else 0."""
    lateness_s: float = 0.0
    """For each collective, because ranks do not come to it at once after the same work."""
    gathering_s: float = 0.0
    """For each gather or reduce-scatter of parameters instead: what FSDP2 does around it, lateness included."""
    in_line: bool = False
    """Whoever sends takes the time from computing, since every core of the host computes."""
    threads: int | None = None
    """That each process computed with, where that is known."""

    def transfer_s(self, event: Collective) -> float:
        around = self.gathering_s if event.kind in ("all_gather", "reduce_scatter") else self.lateness_s
        return self.exchange_s[exchange_of(event)] + max(around, self.lateness_s)

    def lines(self) -> tuple[str, ...]:
        """In words."""
        order = "sending takes turns with computing" if self.in_line else "sending goes on beside computing"
        threads = (
            "" if self.threads is None else f", {self.threads} {'thread' if self.threads == 1 else 'threads'} a rank"
        )
        timed = f"{len(self.call_s):,} different operations, {len(self.exchange_s):,} collectives"
        return (
            f"{timed}: timed on this machine{threads}",
            f"{self.overhead_s * 1e6:.1f} µs of Python and autograd for each operation (measured)",
            f"{self.lateness_s * 1e6:,.0f} µs for each collective, to which ranks come late (measured)",
            f"{self.gathering_s * 1e6:,.0f} µs of FSDP2 for each of its collectives (measured)",
            f"{order}: {'every core' if self.in_line else 'not every core'} of the host computes",
        )

    def seconds(self, trace: Trace, events: Ints, *, otherwise: Floats) -> Floats:
        """Of the kernels at `events`; those whose calls were not kept take `otherwise`."""
        calls = np.array([event.call for i in events.tolist() if isinstance(event := trace.events[i], Kernel)])
        measured = np.array((*self.call_s, 0.0))[calls]
        return np.where(calls >= 0, measured, otherwise) + self.overhead_s


class Simulator:
    """A trace on a cluster, read once, to be simulated under several assumptions."""

    def __init__(self, trace: Trace, cluster: Cluster, *, clocked: Clocked | None = None) -> None:
        if clocked is not None and clocked.in_line:
            trace = replace(trace, events=tuple(map(_in_line, trace.events)))
        self.trace, self.cluster, self.clocked = trace, cluster, clocked
        self.graph = build_graph(trace)
        self._transfers = [(n, trace.events[node.event]) for n, node in enumerate(self.graph.nodes) if node.event >= 0]
        self._reach: dict[tuple[int, ...], Reach] = {}

    def step_s(self, assumptions: Assumptions) -> float:
        return self._run(assumptions)[0].step_s

    def timeline(self, assumptions: Assumptions, *, model_flops_per_token: float | None = None) -> Timeline:
        """The whole result. `model_flops_per_token` is accounting's `model_total`, for the MFU."""
        clock, durations = self._run(assumptions)
        summary = _Summary(self.trace, self.graph, clock, durations, assumptions)
        return replace(summary.timeline(self.cluster, model_flops_per_token), clocked=self.clocked)

    def sensitivity(self, assumptions: Assumptions, names: Iterable[str], *, change: float) -> tuple[Sensitivity, ...]:
        """How the step moves with each named assumption by ∓ `change` of its value, the most moving first."""
        found = []
        for name in names:
            value = getattr(assumptions, name)
            lower, higher = (
                self.step_s(replace(assumptions, **{name: value * factor})) for factor in (1 - change, 1 + change)
            )
            found.append(Sensitivity(name, value, lower, higher))
        return tuple(sorted(found, key=lambda one: -one.swing_s))

    def _run(self, assumptions: Assumptions) -> tuple[Clock, Floats]:
        speeds = StepSpeeds(self.cluster, assumptions)
        durations = speeds.kernel_seconds(self.graph.kernels)
        if self.clocked is not None:
            durations = self.clocked.seconds(self.trace, self.graph.kernel_event, otherwise=durations)
        busy, latest = run_times(self.graph, durations, launch_s=assumptions.launch_s)
        transfers = {number: self._price(event, speeds) for number, event in self._transfers}
        clock = run_clock(self.graph, busy_s=busy, latest_s=latest, transfers=transfers, launch_s=assumptions.launch_s)
        return clock, durations

    def _price(self, event: object, speeds: StepSpeeds) -> Transfer:
        if isinstance(event, Copy):
            return price_copy(event, speeds)
        assert isinstance(event, Collective)
        if self.clocked is not None:
            return Transfer(self.clocked.transfer_s(event), {})
        where = self._reach.get(event.ranks)
        if where is None:
            where = self._reach[event.ranks] = reach(event.ranks, rank=self.trace.rank, cluster=self.cluster)
        return price_collective(event, where, speeds)


def simulate(
    trace: Trace,
    cluster: Cluster,
    *,
    assumptions: Assumptions | None = None,
    model_flops_per_token: float | None = None,
) -> Timeline:
    """The step of `trace` on `cluster`.

    `model_flops_per_token` is accounting's `model_total`. Raises ConfigError where the cluster has fewer GPUs than the
    trace has ranks. Communication: none. Time: some seconds for 300,000 events.
    """
    cluster.check_holds(trace.world_size)
    return Simulator(trace, cluster).timeline(assumptions or Assumptions(), model_flops_per_token=model_flops_per_token)


def sensitivity(
    trace: Trace, cluster: Cluster, *, assumptions: Assumptions | None = None, change: float = 0.1
) -> tuple[Sensitivity, ...]:
    """How the step moves with each assumption by ∓ `change` of its value, the most moving first.

    A fraction may so come to exceed 1: what is asked is how much the step rests on it.
    """
    base = assumptions or Assumptions()
    return Simulator(trace, cluster).sensitivity(base, [field.name for field in fields(base)], change=change)


def work_of(trace: Trace, spans: Spans) -> list[Work]:
    """The events of `spans`, in order."""
    return [event for index in spans.event.tolist() if isinstance(event := trace.events[index], Work)]


def compute_reaches(trace: Trace, spans: Spans, events: Ints) -> Floats:
    """Seconds at which the computing stream has done what was issued on it before each of `events` (indices [N])."""
    computes = np.array([event.stream == COMPUTE for event in work_of(trace, spans)], dtype=bool)
    reached = np.concatenate(([0.0], np.maximum.accumulate(spans.end_s[computes])))
    return reached[np.searchsorted(spans.event[computes], events)]


class _Summary:
    """Reads a clock: spans, and from these who was busy when."""

    def __init__(self, trace: Trace, graph: Graph, clock: Clock, durations: Floats, assumptions: Assumptions) -> None:
        self.trace, self.graph, self.clock, self.assumptions = trace, graph, clock, assumptions
        self.spans = self._spans(durations)
        self.events = work_of(trace, self.spans)
        lanes = np.array([lane_of(event) for event in self.events])
        self.lanes = {name: self._when(lanes == name) for name in dict.fromkeys((COMPUTE, *lanes.tolist()))}
        classes = self.spans.kernel_class.tolist()
        self.kinds_of = np.array([kind_of(*pair) for pair in zip(self.events, classes, strict=True)])

    def timeline(self, cluster: Cluster, model_flops_per_token: float | None) -> Timeline:
        step_s, computing = self.clock.step_s, self.lanes[COMPUTE]
        can_do = step_s * cluster.peak_flops_per_s
        done = sum(
            event.flops
            for event, phase in zip(self.events, self._phase_names(self.spans.event), strict=True)
            if isinstance(event, Kernel) and not phase.startswith("optimizer")
        )
        tokens = self.trace.tokens
        everything = union(
            np.concatenate([lane.starts for lane in self.lanes.values()]),
            np.concatenate([lane.ends for lane in self.lanes.values()]),
        )
        return Timeline(
            cluster=cluster,
            assumptions=self.assumptions,
            step_s=step_s,
            tokens_per_s_per_gpu=tokens / step_s if step_s else 0.0,
            hfu=done / can_do if can_do else 0.0,
            mfu=None if model_flops_per_token is None else model_flops_per_token * tokens / can_do,
            lanes={name: _use(lane, computing) for name, lane in self.lanes.items()},
            kinds={
                kind: _use(self._when(self.kinds_of == kind), computing)
                for kind in dict.fromkeys(self.kinds_of.tolist())
            },
            phases=self._phases(everything),
            idle_s=step_s - everything.seconds,
            issuing_s=len(self.events) * self.assumptions.launch_s,
            spans=self.spans,
        )

    def _spans(self, durations: Floats) -> Spans:
        graph, clock = self.graph, self.clock
        total = np.concatenate(([0.0], np.cumsum(durations)))
        starts = np.concatenate(([0], graph.kernel_stop[:-1]))
        ends = np.empty(len(durations))
        for node, (first, stop) in enumerate(zip(starts.tolist(), graph.kernel_stop.tolist(), strict=True)):
            if stop > first:
                # As in `run_times`, for each kernel of the run.
                done = total[first + 1 : stop + 1] - total[first]
                issued = clock.resume_s[node] + graph.kernel_issued[first:stop] * self.assumptions.launch_s
                held = np.maximum.accumulate(issued - (done - durations[first:stop]))
                ends[first:stop] = done + np.maximum(clock.ready_s[node], held)
        transfers = [number for number, node in enumerate(graph.nodes) if node.event >= 0]
        events = np.array([graph.nodes[number].event for number in transfers], dtype=np.int64)
        event = np.concatenate((graph.kernel_event, events))
        order = np.argsort(event, kind="stable")
        return Spans(
            event=event[order],
            start_s=np.concatenate((ends - durations, clock.ready_s[transfers]))[order],
            end_s=np.concatenate((ends, clock.end_s[transfers]))[order],
            kernel_class=np.concatenate((graph.kernels.classes, np.full(len(transfers), -1)))[order],
        )

    def _when(self, mask: np.ndarray) -> Intervals:
        return union(self.spans.start_s[mask], self.spans.end_s[mask])

    def _phase_names(self, events: Ints) -> list[str]:
        names = ["", *map(_phase_name, self.graph.phases)]
        return [names[i] for i in np.searchsorted(self.graph.phase_event, events, side="right").tolist()]

    def _phases(self, everything: Intervals) -> dict[str, PhaseUse]:
        """Cuts time where the computing stream begins each phase, and adds up parts of one name."""
        cuts = compute_reaches(self.trace, self.spans, self.graph.phase_event)
        edges = np.concatenate(([0.0], cuts, [self.clock.step_s]))
        computing = self.lanes[COMPUTE]
        exposed = {
            name: np.diff(lane.minus(computing).until(edges)) for name, lane in self.lanes.items() if name != COMPUTE
        }
        lengths, busy, any_busy = np.diff(edges), np.diff(computing.until(edges)), np.diff(everything.until(edges))
        names = np.array(["", *map(_phase_name, self.graph.phases)])
        found = {}
        for name in dict.fromkeys(names.tolist()):
            mask = names == name
            if lengths[mask].sum() > 0:
                found[name or "before"] = PhaseUse(
                    seconds=float(lengths[mask].sum()),
                    compute_s=float(busy[mask].sum()),
                    exposed_s={lane: float(s[mask].sum()) for lane, s in exposed.items() if s[mask].sum() > 0},
                    idle_s=float((lengths - any_busy)[mask].sum()),
                )
        return found


def _use(lane: Intervals, computing: Intervals) -> Use:
    return Use(lane.seconds, lane.minus(computing).seconds)


def _in_line(event: Event) -> Event:
    return replace(event, stream=COMPUTE, issued_from=COMPUTE) if isinstance(event, Collective) else event


def lane_of(event: Work) -> str:
    """Where it shows: its stream, but what is sent on the computing stream has a lane of its own."""
    return IN_LINE if event.stream == COMPUTE and not isinstance(event, Kernel) else event.stream


def kind_of(event: Work, kernel_class: int) -> str:
    """Class of a kernel (its number in KERNEL_CLASSES), collective with its axis, or direction of a copy."""
    return KERNEL_CLASSES[kernel_class] if isinstance(event, Kernel) else transfer_kind(event)


def transfer_kind(event: Collective | Copy) -> str:
    return f"{event.kind} {event.axis}" if isinstance(event, Collective) else event.direction


def _phase_name(phase: Phase) -> str:
    numbered = not phase.where or any(character.isdigit() for character in phase.where)
    return phase.name if numbered else f"{phase.name}.{phase.where}"
