"""How ranks agree that something failed: every rank raises the same error, and none waits for another.

A *failure* is one rank's error as one line of text; failures travel as `{rank: text}`. Between two collectives a
rank must not raise on its own, so each step runs under `attempt` and is followed by `gather_failures`, or runs on
rank 0 alone under `on_main`. Without a process group there is one rank, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from amalthea.core.errors import AmaltheaError

T = TypeVar("T")
Failures = dict[int, str]


def group_rank() -> int:
    """This process in the default process group; 0 without one."""
    return dist.get_rank() if in_group() else 0


def in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def gather(value: T) -> list[T]:
    """The value of every rank, on every rank. Communication: one all-gather of objects, world-wide."""
    if not in_group():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def attempt(action: Callable[[], T]) -> tuple[T | None, Failures]:
    """Run `action` and return its result, or None and what failed on which rank."""
    try:
        return action(), {}
    except CheckpointException as error:  # torch's own agreement: it has the error of every rank
        return None, {rank: one_line(cause) for rank, (cause, _) in error.failures.items()}
    except Exception as error:
        return None, {group_rank(): one_line(error)}


def on_main(action: Callable[[], T]) -> tuple[T | None, Failures]:
    """What `attempt(action)` gave on rank 0, on every rank. Communication: one broadcast of an object."""
    outcome: list[Any] = [attempt(action) if group_rank() == 0 else None]
    if in_group():
        dist.broadcast_object_list(outcome, src=0)
    return outcome[0]


def gather_failures(failures: Failures) -> Failures:
    """The failures that any rank knows of, on every rank."""
    merged: Failures = {}
    for of_rank in gather(failures):
        merged |= of_rank
    return merged


def describe(failures: Failures) -> str:
    """`ranks 0, 3: [Errno 28] No space left on device`; ranks are left out where there is only one."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        ranks_of.setdefault(text, []).append(rank)
    if not in_group() or dist.get_world_size() == 1:
        return "; ".join(ranks_of)
    return "; ".join(f"{_name(ranks)}: {text}" for text, ranks in ranks_of.items())


def one_line(error: BaseException) -> str:
    """The error's own words; its type goes in front of those that say too little alone."""
    text = " ".join(str(error).split())
    if isinstance(error, AmaltheaError) or (isinstance(error, OSError) and text):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _name(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
