"""How the ranks are laid out."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from amalthea.core.component import Component


class ParallelConfig(Component):
    """Degrees of the mesh axes: `dp_replicate · dp_shard` ranks, where `dp_shard = ep · efsdp`."""

    dp_replicate: PositiveInt = 1
    """Replicas of the model (HSDP)."""
    dp_shard: PositiveInt | Literal["auto"] = "auto"
    """Ranks that share one replica (FSDP); `auto` takes what the replicas leave."""
    ep: PositiveInt = 1
    """Ranks that share one copy of the routed experts; divides `dp_shard` and the number of experts."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass and gather them again in backward."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are reduced."""
