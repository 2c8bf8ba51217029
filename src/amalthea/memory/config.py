"""What is kept, recomputed or moved away."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from amalthea.core.component import Component


class MemoryConfig(Component):
    """Activation memory."""

    recompute: Literal["none", "block"] = "none"
    """`block` keeps only the input of each group of blocks and runs the group again in backward."""
    blocks_per_group: PositiveInt = 1
    """Consecutive blocks that are gathered, and by choice recomputed, as one."""
    sequences_per_gather: PositiveInt = 1
    """Microbatches that pass through a group one after the other, under one gather of its parameters."""
    offload: bool = False
    """Keep the inputs of recomputed groups in host memory between forward and backward; needs `recompute=block`."""
    offload_budget_gib: PositiveFloat | None = None
    """Host memory for it per rank; what does not fit stays on the device. None takes what is needed."""
    unshard_async_op: bool = False
    """Gather parameters by asynchronous collectives on the compute stream's memory, with explicit prefetch: frees
    gathered buffers earlier than FSDP2's own streams do."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.offload and self.recompute == "none":
            raise ValueError(
                "offload moves the inputs of recomputed groups, but recompute is none; set recompute=block"
            )
        if self.offload_budget_gib is not None and not self.offload:
            raise ValueError("offload_budget_gib is set, but offload is false; set offload=true or drop the budget")
        return self
