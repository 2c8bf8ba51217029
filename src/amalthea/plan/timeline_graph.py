"""A trace as a graph of what waits for what, without any times.

Nouns. A *node* is one of three things: a *run* of kernels that follow one another on a stream with nothing else to
wait for or be waited for in between; a *transfer*, a collective or a copy; a *resume*, the moment from which the
processor issues again after it waited for the device. Everything issued between two of these belongs to the resume
before it and cannot start before it was issued: `issued` counts what the processor launched since.

So a step of 300,000 kernels has some ten thousand nodes, and simulating it again under other assumptions is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from amalthea.plan.events import Collective, Copy, Kernel, Phase, Record, Synchronize, Trace, Wait
from amalthea.plan.step_speeds import Floats, Ints, KernelTable, dtype_number, kernel_class

NodeKind = Literal["run", "transfer", "resume"]


@dataclass
class Node:
    """`after` are the nodes that must have ended, besides the resume that it belongs to."""

    kind: NodeKind
    stream: str
    resume: int
    """Number of the resume node; its own predecessor for a resume, -1 for the first."""
    issued: int
    """Launches since that resume, with the node's own where it is a transfer."""
    after: list[int]
    event: int = -1
    """Of a transfer."""


@dataclass(frozen=True)
class Graph:
    """Nodes in order of issue, and the kernels of all runs, sorted by node."""

    nodes: tuple[Node, ...]
    kernels: KernelTable
    kernel_event: Ints
    kernel_issued: Ints
    """Launches since the run's resume, with its own."""
    kernel_stop: Ints
    """Of each node: one past its last kernel; a node's kernels begin where those of the node before stop."""
    phase_event: Ints
    phases: tuple[Phase, ...]
    num_issued: int
    """Launches since the last resume."""


def build_graph(trace: Trace) -> Graph:
    """Reads a trace once. A wait for an event that the trace does not record is one for what was before it."""
    builder = _Builder()
    for index, event in enumerate(trace.events):
        builder.add(index, event)
    return builder.graph()


@lru_cache(maxsize=65536)
def _class_of(name: str, is_optimizer: bool) -> int:
    kernel = Kernel(name, "", 1.0, 0, "")
    return kernel_class(kernel, Phase("optimizer") if is_optimizer else None)


@dataclass
class _Builder:
    nodes: list[Node] = field(default_factory=lambda: [Node("resume", "", -1, 0, [])])
    open_run: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, list[int]] = field(default_factory=dict)
    """Nodes that the next one on a stream comes after."""
    recorded: dict[int, int] = field(default_factory=dict)
    resume: int = 0
    issued: int = 0
    is_optimizer: bool = False
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    columns: list[tuple[float, float, int, int, int, int, int]] = field(default_factory=list)

    def add(self, index: int, event: object) -> None:
        if isinstance(event, Kernel):
            self._kernel(index, event)
        elif isinstance(event, Record):
            node = self._reached(event.stream)
            if node is not None:
                self.recorded[event.event] = node
        elif isinstance(event, Wait):
            node = self.recorded.get(event.event)
            if node is not None and self.nodes[node].stream != event.stream:
                self.open_run.pop(event.stream, None)
                self.waiting.setdefault(event.stream, []).append(node)
        elif isinstance(event, Collective):
            source = self._reached(event.issued_from)
            self._transfer(index, event.stream, [] if source is None else [source])
        elif isinstance(event, Copy):
            self._transfer(index, event.stream, [])
        elif isinstance(event, Synchronize):
            self._synchronize(event.event)
        elif isinstance(event, Phase):
            self.is_optimizer = event.name == "optimizer"
            self.phases.append((index, event))

    def _kernel(self, index: int, event: Kernel) -> None:
        self.issued += 1
        node = self.open_run.get(event.stream)
        if node is None:
            node = self.open_run[event.stream] = self._node("run", event.stream)
        number = _class_of(event.name, self.is_optimizer) if event.flops > 0 else 0
        dtype = _dtype_of(event.dtype)
        self.columns.append((event.flops, event.bytes_moved, number, dtype, index, self.issued, node))

    def _transfer(self, index: int, stream: str, after: list[int]) -> None:
        self.issued += 1
        self.open_run.pop(stream, None)
        node = self._node("transfer", stream, after)
        self.nodes[node].event = index

    def _node(self, kind: NodeKind, stream: str, after: list[int] | None = None) -> int:
        before = self.last.get(stream)
        every = [*(after or []), *self.waiting.pop(stream, []), *([] if before is None else [before])]
        self.nodes.append(Node(kind, stream, self.resume, self.issued, list(dict.fromkeys(every))))
        self.last[stream] = len(self.nodes) - 1
        return self.last[stream]

    def _reached(self, stream: str) -> int | None:
        """The node after whose end the stream is where it is now; none where it has done nothing."""
        if self.waiting.get(stream):
            self._node("run", stream)
        self.open_run.pop(stream, None)
        return self.last.get(stream)

    def _synchronize(self, event: int | None) -> None:
        if event is None:
            ends = [self._reached(stream) for stream in dict.fromkeys((*self.last, *self.waiting))]
        else:
            ends = [self.recorded.get(event)]
        after = [node for node in ends if node is not None]
        self.nodes.append(Node("resume", "", self.resume, self.issued, after))
        self.resume, self.issued = len(self.nodes) - 1, 0
        self.open_run.clear()

    def graph(self) -> Graph:
        table = np.array(self.columns, dtype=np.float64).reshape(-1, 7)
        # Stable: kernels of a run stay in order, and other runs' kernels between them move out.
        table = table[np.argsort(table[:, 6], kind="stable")]
        owners = table[:, 6].astype(np.int64)
        return Graph(
            nodes=tuple(self.nodes),
            kernels=KernelTable(table[:, 0], table[:, 1], table[:, 2].astype(np.int64), table[:, 3].astype(np.int64)),
            kernel_event=table[:, 4].astype(np.int64),
            kernel_issued=table[:, 5].astype(np.int64),
            kernel_stop=np.searchsorted(owners, np.arange(len(self.nodes)), side="right"),
            phase_event=np.array([index for index, _ in self.phases], dtype=np.int64),
            phases=tuple(phase for _, phase in self.phases),
            num_issued=self.issued,
        )


_dtype_of = lru_cache(maxsize=64)(dtype_number)


def run_times(graph: Graph, durations: Floats, *, launch_s: float) -> tuple[Floats, Floats]:
    """Of each run: its kernels' seconds, and seconds from its resume to its end if only issuing held it up.

    A run of kernels j = 1 … m that may start at time t, issued at i_j after a resume at r, ends at
    max(t + Σd, r + max_j(i_j + Σ_{k ≥ j} d_k)): two numbers are all that its simulation needs.
    """
    num_nodes = len(graph.nodes)
    total = np.concatenate(([0.0], np.cumsum(durations)))
    stop = graph.kernel_stop
    start = np.concatenate(([0], stop[:-1]))
    busy = total[stop] - total[start]
    latest = np.array([node.issued for node in graph.nodes]) * launch_s
    filled = np.flatnonzero(stop > start)
    if len(filled):
        # What is left of the run when each of its kernels is issued.
        owners = np.repeat(np.arange(num_nodes), stop - start)
        left = graph.kernel_issued * launch_s + total[stop][owners] - total[:-1]
        latest[filled] = np.maximum.reduceat(left, start[filled])
    return busy, latest
