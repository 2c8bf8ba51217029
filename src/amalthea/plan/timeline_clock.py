"""Sets a graph in time: an event-driven simulation in which transfers share links.

A transfer waits for its latency and then progresses on all of its links at once. Where the transfers under way would
together use a link more than wholly, each of them slows down by that factor (fair shares); a transfer is held back by
the most crowded of its links.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from amalthea.plan.network import LINKS, Link, Transfer
from amalthea.plan.step_speeds import Floats
from amalthea.plan.timeline_graph import Graph


@dataclass(frozen=True)
class Clock:
    """Seconds from the step's start, by node: from when it could start, its end, and its resume's time."""

    ready_s: Floats
    """When everything before a run has ended; when a transfer started."""
    end_s: Floats
    resume_s: Floats
    step_s: float


@dataclass
class _Moving:
    """Transfers under way; `left` are seconds that they would need alone."""

    transfers: dict[int, Transfer]
    left: dict[int, float] = field(default_factory=dict)
    slower: dict[int, float] = field(default_factory=dict)
    now: float = 0.0

    def advance(self, now: float) -> None:
        for node in self.left:
            self.left[node] -= (now - self.now) / self.slower[node]
        self.now = now

    def join(self, node: int, now: float) -> None:
        self.advance(now)
        self.left[node] = self.transfers[node].moving_s
        self._share()

    def leave(self, node: int) -> None:
        del self.left[node]
        self._share()

    def next_end(self) -> tuple[float, int] | None:
        """Whoever ends first if nothing changes."""
        if not self.left:
            return None
        node = min(self.left, key=lambda node: self.left[node] * self.slower[node])
        return self.now + max(0.0, self.left[node]) * self.slower[node], node

    def _share(self) -> None:
        used: dict[Link, float] = dict.fromkeys(LINKS, 0.0)
        for node in self.left:
            transfer = self.transfers[node]
            for link, seconds in transfer.seconds.items():
                used[link] += seconds / transfer.moving_s
        self.slower = {node: max(1.0, *(used[link] for link in self.transfers[node].seconds)) for node in self.left}


def run_clock(
    graph: Graph, *, busy_s: Floats, latest_s: Floats, transfers: dict[int, Transfer], launch_s: float
) -> Clock:
    """Times of all nodes. `busy_s` and `latest_s` are `run_times`'; `transfers` by node."""
    return _Simulation(graph, busy_s.tolist(), latest_s.tolist(), transfers, launch_s).run()


class _Simulation:
    def __init__(
        self, graph: Graph, busy: list[float], latest: list[float], transfers: dict[int, Transfer], launch_s: float
    ) -> None:
        self.nodes, self.busy, self.latest, self.launch_s = graph.nodes, busy, latest, launch_s
        self.transfers = transfers
        self.moving = _Moving(transfers)
        self.ready = [0.0] * len(graph.nodes)
        self.end = [0.0] * len(graph.nodes)
        self.followers: list[list[int]] = [[] for _ in graph.nodes]
        self.missing = [len(node.after) + (node.resume >= 0) for node in graph.nodes]
        self.queue: list[tuple[float, int, bool]] = []
        """(time, node, whether it ends then; else it starts to move)."""
        for number, node in enumerate(graph.nodes):
            for before in node.after if node.resume < 0 else (*node.after, node.resume):
                self.followers[before].append(number)
        self.issuing_s = graph.num_issued * launch_s

    def run(self) -> Clock:
        self._finish(0, 0.0)
        while self.queue or self.moving.left:
            moving = self.moving.next_end()
            if moving is not None and (not self.queue or moving[0] <= self.queue[0][0]):
                time, node = moving
                self.moving.advance(time)
                self.moving.leave(node)
                self._finish(node, time)
                continue
            time, node, ends = heapq.heappop(self.queue)
            if ends:
                self._finish(node, time)
            else:
                self.moving.join(node, time)
        resume = [node.resume if node.resume >= 0 else 0 for node in self.nodes]
        ends = np.array(self.end)
        last = max(number for number, node in enumerate(self.nodes) if node.kind == "resume")
        step_s = max(float(ends.max()), self.end[last] + self.issuing_s)
        return Clock(np.array(self.ready), ends, ends[resume], step_s)

    def _finish(self, number: int, time: float) -> None:
        self.end[number] = time
        for follower in self.followers[number]:
            if self.nodes[follower].resume != number:
                self.ready[follower] = max(self.ready[follower], time)
            self.missing[follower] -= 1
            if not self.missing[follower]:
                self._start(follower)

    def _start(self, number: int) -> None:
        """Everything before a node has ended: its end, or its start, is known."""
        node = self.nodes[number]
        resumed = self.end[node.resume]
        if node.kind == "run":
            end = max(self.ready[number] + self.busy[number], resumed + self.latest[number])
            heapq.heappush(self.queue, (end, number, True))
            return
        time = max(self.ready[number], resumed + node.issued * self.launch_s)
        if node.kind == "resume":
            heapq.heappush(self.queue, (time, number, True))
            return
        self.ready[number] = time
        transfer = self.transfers[number]
        moves = transfer.moving_s > 0
        heapq.heappush(self.queue, (time + transfer.latency_s, number, not moves))
