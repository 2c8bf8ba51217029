"""How the ranks are laid out."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from amalthea.core.component import Component


class ParallelConfig(Component):
    """Degrees of the mesh axes: `dp_replicate · dp_shard · cp` ranks, where `dp_shard · cp = ep · efsdp`."""

    dp_replicate: PositiveInt = 1
    """Replicas of the model (HSDP)."""
    dp_shard: PositiveInt | Literal["auto"] = "auto"
    """Shares of the batch in one replica; with `cp` it makes up the ranks that share one replica (FSDP). `auto` takes
    what the other degrees leave."""
    cp: PositiveInt = 1
    """Ranks that share each sequence, for sequences longer than one rank can hold; divides the sequence length and
    the query heads."""
    ep: PositiveInt = 1
    """Ranks that share one copy of the routed experts; divides `dp_shard · cp` and the number of experts."""
    dispatch: Literal["auto", "flat", "hierarchical"] = "auto"
    """How tokens travel to experts: `flat` sends one row per expert, `hierarchical` one per node that holds any of a
    token's experts, and fans out there. `auto` is hierarchical where `ep` spans several whole nodes."""
    dispatch_chunks: PositiveInt = 1
    """Parts of a pass's tokens that travel to experts one after the other, each while another one is computed. More of
    them hide more of the way and make smaller products."""
    ranks_per_node: PositiveInt | Literal["auto"] = "auto"
    """For the dispatch; `auto` takes the ranks that were started on this node."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass and gather them again in backward."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are reduced."""
