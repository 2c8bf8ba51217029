"""Collectives as events. Whoever starts one, it ends in one of the dispatcher's `c10d` operations.

As with NCCL in torch 2.13, a collective that its caller waits for at once runs on the current stream; an asynchronous
one runs on its group's own stream, and its tensors are held until it has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from amalthea.core.errors import ConfigError
from amalthea.plan.events import Collective, CollectiveKind
from amalthea.plan.trace.costs import tensors
from amalthea.plan.trace.recorder import Recorder
from amalthea.plan.trace.streams import TracedEvent, TracedStream


@dataclass(frozen=True)
class _Rule:
    """Which arguments of an operation are what, by number."""

    kind: CollectiveKind
    received: int
    sent: int
    group: int
    is_async: int


_RULES = {
    "_allgather_base_": _Rule("all_gather", 0, 1, 2, 3),
    "_reduce_scatter_base_": _Rule("reduce_scatter", 0, 1, 2, 4),
    "alltoall_base_": _Rule("all_to_all", 0, 1, 2, 5),
    "allreduce_": _Rule("all_reduce", 0, 0, 1, 4),
    "broadcast_": _Rule("broadcast", 0, 0, 1, 4),
    "reduce_": _Rule("reduce", 0, 0, 1, 5),
}
_KNOWN = (
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce", "broadcast", "reduce"),
)
"""As a caller knows those of `_RULES`."""
NAMESPACES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd"))
"""Of operations that send something. Functional ones have no rule: their fakes would pass for local kernels."""


class TracedWork(dist.Work):
    """What a caller of a traced collective waits on."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        self._finish()
        return True

    def is_completed(self) -> bool:
        return True


@dataclass
class Collectives:
    """Writes collectives down; `axes` names groups of ranks by the mesh axis that they belong to."""

    recorder: Recorder
    axes: dict[str, str] = field(default_factory=dict)
    _under_way: dict[int, tuple[TracedWork, Any]] = field(default_factory=dict)
    _ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _last: TracedWork | None = None
    """Held until its caller has it."""

    def record(self, func: Any, args: Any) -> Any:
        """Writes one down and returns what its operation returns, without running it.

        Raises ConfigError for one without a rule.
        """
        rule = None if func.namespace != "c10d" else _RULES.get(func._schema.name.partition("::")[2])
        if rule is None:
            raise ConfigError(
                f"the step calls {func._schema.name}, a collective that the planner has no rule for; of "
                f"torch.distributed, call {', '.join(_KNOWN)}, or leave it out of what is planned"
            )
        received, sent = args[rule.received], args[rule.sent]
        is_async = len(args) <= rule.is_async or bool(args[rule.is_async])
        stream = self.write(rule, args, is_async=is_async)
        self._last = work = self._work(stream, held=(received, sent)) if is_async else TracedWork(lambda: None)
        boxed = work.boxed()
        return boxed if len(func._schema.returns) == 1 else (received, boxed)

    def write(self, rule: _Rule, args: Any, *, is_async: bool) -> str:
        """Writes the event and returns the stream that it is on."""
        recorder, group = self.recorder, dist.ProcessGroup.unbox(args[rule.group])
        name = group.group_name
        axis = self.axes.get(name, "world")
        if name not in self._ranks:
            self._ranks[name] = tuple(dist.get_process_group_ranks(group))
        sent = list(tensors(args[rule.sent]))
        stream = f"async {axis}" if is_async else recorder.stream
        recorder.write(
            Collective(
                kind=rule.kind,
                axis=axis,
                ranks=self._ranks[name],
                bytes_out=_bytes(sent),
                stream=stream,
                issued_from=recorder.stream,
                dtype=str(sent[0].dtype)[6:],
                bytes_in=_bytes(list(tensors(args[rule.received]))),
            )
        )
        return stream

    def observe(self, func: Any, args: Any) -> None:
        """Writes one down that is about to run for real."""
        rule = _RULES.get(func._schema.name.partition("::")[2])
        if rule is not None:
            self.write(rule, args, is_async=False)

    def _work(self, stream: str, *, held: Any) -> TracedWork:
        done = TracedEvent(self.recorder)
        done.record(TracedStream(self.recorder, name=stream))

        def finish() -> None:
            done.wait()
            self._under_way.pop(id(work), None)

        work = TracedWork(finish)
        self._under_way[id(work)] = (work, held)
        return work


def _bytes(found: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in found)
