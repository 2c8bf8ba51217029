"""Who optimizes what, decided by name and shape; plans ask the same without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    """Decides by name: routed experts, other hidden matrices, everything else (AdamW)."""
    optimizer: OptimizerName = "adamw"
    if ".experts." in name:
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


def stored_parameter(
    name: str, shape: tuple[int, ...], config: OptimConfig, *, head_dim: int, experts_by_rows: bool
) -> StoredParameter:
    """How the planner sees a parameter that Muon takes."""
    storage: Storage = "rows"
    if len(shape) == 3:
        storage = "expert_rows" if experts_by_rows else "experts"
    is_projection = name.endswith((".wq.weight", ".wk.weight", ".wv.weight"))
    return StoredParameter(name, tuple(shape), storage, head_dim if config.muon.per_head and is_projection else None)
