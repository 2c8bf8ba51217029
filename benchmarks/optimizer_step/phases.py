"""Where our step spends its time: timers around the phases of `DistMuon`, on rank averages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from amalthea.flexshard import runtime
from amalthea.optim.dist_muon import DistMuon

_PHASES = {
    "_directions": "momentum and direction",
    "_orthogonalize": "Newton-Schulz",
    "_apply": "apply",
}
_EXCHANGE_PHASES = {
    "launch_to_owners": "all-to-all: start",
    "finish_to_owners": "all-to-all: unpack",
    "launch_back": "all-to-all back: pack, start",
    "finish_back": "all-to-all back: end",
}


class Phases:
    """Seconds by phase, by the clock and of this thread's processor time, inside `with Phases(muon) as phases`.

    A wait inside another phase counts as wait, not as that phase.
    """

    def __init__(self, muon: DistMuon) -> None:
        self.wall_s: dict[str, float] = defaultdict(float)
        self.cpu_s: dict[str, float] = defaultdict(float)
        self._muon = muon
        self._open: list[list[float]] = []
        self._patches = ExitStack()

    def __enter__(self) -> Phases:
        for target, names in ((self._muon, _PHASES), (self._muon.exchange, _EXCHANGE_PHASES)):
            for method, phase in names.items():
                self._patch(target, method, phase)
        self._patch(runtime._Pending, "wait", "all-to-all: wait")
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _patch(self, target: Any, method: str, phase: str) -> None:
        timed = self._timed(getattr(target, method), phase)
        self._patches.enter_context(mock.patch.object(target, method, timed))

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._open.append([0.0, 0.0])
            wall, cpu = time.perf_counter(), time.thread_time()
            result = function(*args, **kwargs)
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            inner_wall, inner_cpu = self._open.pop()
            self.wall_s[phase] += wall - inner_wall
            self.cpu_s[phase] += cpu - inner_cpu
            if self._open:
                self._open[-1][0] += wall
                self._open[-1][1] += cpu
            return result

        return timed
