"""Seconds of single operations and collectives on this machine, as many processes at once as a node has ranks.

A step of thousands of operations has some hundred different ones. Each is called again, on memory of its own, in every
process at the same time, so that what ranks take from each other (cores, memory bandwidth) is in the figures. What no
single operation shows is measured apart: Python between operations, ranks that come late, and FSDP2 around its
collectives. Left out are caches that the operation before has filled.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from amalthea.core.errors import ConfigError
from amalthea.plan.events import Collective, Exchange, Trace, exchange_of
from amalthea.plan.stopwatch_worker import Device, Host, serve
from amalthea.plan.timeline import Clocked
from amalthea.plan.trace.calls import Call

_START_S = 120.0
_ANSWER_S = 300.0
_PASSES = 3


class Stopwatch:
    """Processes that measure, started on entering and kept; what was measured once is not measured again.

    `device` is cpu or cuda; each process has its own GPU. `threads` is how many each process computes with, as each
    rank of the run will; none leaves it to torch, and to OMP_NUM_THREADS, which processes inherit.
    Raises ConfigError where a process fails or does not answer.
    Communication: gloo on this host, or NCCL. Memory: 0.3 GB for each process, and the tensors of one call.
    """

    def __init__(
        self, num_processes: int, *, device: Device = "cpu", threads: int | None = None, budget_s: float = 0.04
    ) -> None:
        if num_processes < 1:
            raise ConfigError(f"{num_processes} processes cannot be measured; give 1 or more")
        self.num_processes, self.budget_s = num_processes, budget_s
        self.device: Device = device
        cores = len(os.sched_getaffinity(0))
        self.threads = threads
        """Once the processes are there, what they do have."""
        self.is_crowded = device == "cpu" and num_processes >= cores
        """Every core computes, so whatever is sent takes time from that."""
        self.shares_cores = device == "cpu" and num_processes > cores
        """While one process waits, another computes on its core."""
        self._kernels: dict[Call, float] = {}
        self._exchanges: dict[Exchange, float] = {}
        self._pipes: list[Connection] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # A fresh interpreter each: one that is forked after torch's threads were at work may hang.
        context = mp.get_context("spawn")
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        for rank in range(self.num_processes):
            ours, theirs = context.Pipe()
            host = Host(rank, self.num_processes, str(Path(folder) / "store"), self.device, self.threads)
            process = context.Process(target=serve, args=(host, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._stack.callback(_end, process)
        try:
            self.threads = int(self._answers(_START_S)[0][0])
        except ConfigError:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._stack.close()

    def kernels(self, calls: Sequence[Call]) -> list[float]:
        """Seconds of each call, as processes that all call it take on average."""
        new = [call for call in dict.fromkeys(calls) if call not in self._kernels]
        if new:
            # A shared machine is faster at one moment than at another: each operation is timed at several.
            passes = [self._ask(("kernels", new, self.budget_s / _PASSES)) for _ in range(_PASSES)]
            self._kernels.update(zip(new, map(fmean, zip(*passes, strict=True)), strict=True))
        return [self._kernels[call] for call in calls]

    def exchanges(self, exchanges: Sequence[Exchange]) -> list[float]:
        """Seconds of each collective, while groups like it do the same beside it."""
        new = [one for one in dict.fromkeys(exchanges) if one not in self._exchanges]
        if new:
            self._exchanges.update(zip(new, self._ask(("exchanges", new, self.budget_s)), strict=True))
        return [self._exchanges[one] for one in exchanges]

    def clock(self, trace: Trace) -> Clocked:
        """Everything that a simulation of `trace` asks for; its calls must have been kept."""
        sent = [exchange_of(event) for event in trace.events if isinstance(event, Collective)]
        return Clocked(
            call_s=tuple(self.kernels(trace.calls)),
            exchange_s=dict(zip(sent, self.exchanges(sent), strict=True)),
            overhead_s=self.overhead_s if self.device == "cpu" else 0.0,
            lateness_s=self.lateness_s,
            # In the small model that shows it all wait at once; in a step somebody computes meanwhile.
            gathering_s=0.0 if self.device == "cuda" or self.shares_cores else self.gathering_s,
            in_line=self.is_crowded,
            threads=self.threads,
        )

    @cached_property
    def overhead_s(self) -> float:
        """Of Python and autograd for each operation of a model's forward and backward, besides the operation."""
        return self._ask(("overhead", None, self.budget_s))[0]

    @cached_property
    def lateness_s(self) -> float:
        """Of a collective, because ranks do not come to it at once after the same work."""
        return self._ask(("lateness", None, self.budget_s))[0] if self.num_processes > 1 else 0.0

    @cached_property
    def gathering_s(self) -> float:
        """Of FSDP2 for each of its collectives, beside them."""
        return self._ask(("gathering", None, self.budget_s))[0] if self.num_processes > 1 else 0.0

    def _ask(self, request: Any) -> list[float]:
        for pipe in self._pipes:
            try:
                pipe.send(request)
            except OSError:
                raise ConfigError("a process that measures this machine has ended; measure again") from None
        answers = self._answers(_ANSWER_S)
        return [fmean(values) for values in zip(*answers, strict=True)]

    def _answers(self, patience_s: float) -> list[list[float]]:
        found = []
        for pipe in self._pipes:
            try:
                if not pipe.poll(patience_s):
                    waited = f"{self.num_processes} processes did not measure within {patience_s:g} s"
                    raise ConfigError(f"{waited}; take fewer GPUs")
                answer = pipe.recv()
            except EOFError:
                raise ConfigError("a process that measures this machine has ended; its message is above") from None
            if isinstance(answer, str):
                raise ConfigError(f"this machine cannot be measured: {answer}")
            found.append(answer)
        return found


def _end(process: Any) -> None:
    process.join(timeout=2.0)
    process.kill()
    process.join()
