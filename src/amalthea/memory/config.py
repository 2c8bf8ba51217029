"""What is kept, recomputed or moved away."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from amalthea.core.component import Component

Kept = Literal["attention", "projections", "experts", "all_to_all"]
"""Operations whose outputs selective recompute may keep: attention; products with a dense matrix; products with
experts; tokens that came from other ranks."""


class MemoryConfig(Component):
    """What lies on the device, and when."""

    recompute: Literal["none", "block", "selective"] = "none"
    """`block` keeps only the input of each group of blocks and runs the group again in backward; `selective` keeps the
    outputs of the operations in `keep` too."""
    keep: tuple[Kept, ...] = ("attention", "projections", "all_to_all")
    """With `recompute=selective`: attention, projections (products with a dense matrix), experts (products with
    experts, `top_k` times as large), all_to_all (tokens from other ranks, so that they travel once)."""
    blocks_per_group: PositiveInt = 1
    """Consecutive blocks that are gathered, and by choice recomputed, as one."""
    sequences_per_gather: PositiveInt = 1
    """Microbatches that pass through a group one after the other, under one gather of its parameters."""
    offload: bool = False
    """Keep the inputs of recomputed groups in host memory between forward and backward; needs `recompute=block`."""
    offload_budget_gib: PositiveFloat | None = None
    """Host memory for it per rank; what does not fit stays on the device. None takes what is needed."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory; a batch of it comes to the device when its turn in the step is."""
    offload_parameters: bool = False
    """Keep this rank's parameters and their gradients in host memory; parameters come to the device where they are
    gathered, and both, a batch at a time, where the optimizer's step wants them."""
    loss_budget_gib: PositiveFloat | None = None
    """Memory for logits in the vocabulary loss, per rank: chooses how many tokens have theirs at one time. None takes
    `model.loss_chunk_tokens`."""
    plan_at_start: bool = True
    """Before a run on a GPU, or one that takes a good part of the host's memory, trace its step and refuse it where it
    does not fit, as `amalthea plan` would; half a minute for 74 layers."""
    track: bool = False
    """On a CPU, count live tensor storages: peak allocated memory becomes exact, and activations have names where
    memory runs out. Costs about 15 µs an operation. A GPU's allocator counts by itself."""
    unshard_async_op: bool = False
    """Gather parameters by asynchronous collectives on the compute stream's memory, with explicit prefetch: frees
    gathered buffers earlier than FSDP2's own streams do."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.offload and self.recompute == "none":
            raise ValueError(
                "offload moves the inputs of recomputed groups, but recompute is none; set recompute=block"
            )
        if self.recompute == "selective" and not self.keep:
            raise ValueError("recompute is selective, but keep names no operation; name one or set recompute=block")
        if self.offload_budget_gib is not None and not self.offload:
            raise ValueError("offload_budget_gib is set, but offload is false; set offload=true or drop the budget")
        return self
