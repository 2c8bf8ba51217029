"""Who optimizes what, decided by name and shape; plans ask the same without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from amalthea.core.errors import ConfigError
from amalthea.flexshard.layout import Storage, StoredParameter
from amalthea.optim.config import OptimConfig

OptimizerName = Literal["muon", "adamw"]


@dataclass(frozen=True)
class Assignment:
    """Which optimizer takes a parameter, and why."""

    name: str
    shape: tuple[int, ...]
    optimizer: OptimizerName
    reason: str


def assign(name: str, shape: tuple[int, ...], config: OptimConfig) -> Assignment:
    """Decides by name: a pattern of `optim.by_name` first, then routed experts, hidden matrices, the rest (AdamW).

    Raises ConfigError where a pattern gives Muon what is no matrix.
    """
    optimizer: OptimizerName = "adamw"
    if pattern := next((pattern for pattern in config.by_name if fnmatchcase(name, pattern)), None):
        optimizer, reason = config.by_name[pattern], f"optim.by_name {pattern}"
        if optimizer == "muon" and len(shape) < 2:
            raise ConfigError(
                f"optim.by_name gives {name} {tuple(shape)} to muon, which takes matrices; choose adamw for {pattern}"
            )
    elif ".experts." in name:
        optimizer, reason = config.experts, "routed expert"
    elif name.startswith(("embed.", "head.")):
        reason = "embedding or head"
    elif ".router." in name:
        reason = "router"
    elif len(shape) == 2:
        optimizer, reason = config.matrices, "hidden matrix"
    else:
        reason = "vector"
    return Assignment(name, tuple(shape), optimizer, reason)


def assign_all(named_shapes: Iterable[tuple[str, tuple[int, ...]]], config: OptimConfig) -> list[Assignment]:
    """One assignment per parameter, in order. Raises ConfigError where a pattern of `optim.by_name` matches none."""
    assignments = [assign(name, tuple(shape), config) for name, shape in named_shapes]
    unused = [p for p in config.by_name if not any(fnmatchcase(a.name, p) for a in assignments)]
    if unused:
        kinds = ", ".join(by_kind(assignments))
        raise ConfigError(
            *(f"optim.by_name has {pattern}, which matches no parameter; there are: {kinds}" for pattern in unused)
        )
    return assignments


def by_kind(assignments: list[Assignment]) -> dict[str, list[Assignment]]:
    """Assignments of the same parameter of all layers together, under its name with `*` for the layer."""
    kinds: dict[str, list[Assignment]] = {}
    for assignment in assignments:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", assignment.name), []).append(assignment)
    return kinds


def describe(assignments: list[Assignment]) -> list[str]:
    """One line per optimizer: what it takes and why. A matrix that falls to AdamW is named like any other."""
    lines = []
    for optimizer in ("muon", "adamw"):
        taken = [a for a in assignments if a.optimizer == optimizer]
        names: dict[str, list[str]] = {}
        for kind, members in by_kind(taken).items():
            short = kind.removeprefix("blocks.*.").removesuffix(".weight")
            names.setdefault(members[0].reason, []).append(short)
        reasons = "; ".join(f"{reason}: {' '.join(kinds)}" for reason, kinds in names.items())
        lines.append(f"{optimizer}: {sum(math.prod(a.shape) for a in taken):,} parameters; {reasons or 'none'}")
    return lines


def stored_parameter(
    name: str, shape: tuple[int, ...], config: OptimConfig, *, head_dim: int, experts_by_rows: bool
) -> StoredParameter:
    """How the planner sees a parameter that Muon takes."""
    storage: Storage = "rows"
    if len(shape) == 3:
        storage = "expert_rows" if experts_by_rows else "experts"
    is_projection = name.endswith((".wq.weight", ".wk.weight", ".wv.weight"))
    return StoredParameter(name, tuple(shape), storage, head_dim if config.muon.per_head and is_projection else None)
