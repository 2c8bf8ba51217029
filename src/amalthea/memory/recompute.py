"""Running a block again in backward instead of keeping its activations."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from amalthea.model.transformer import Transformer


def apply_recompute(model: Transformer) -> None:
    """Makes every block keep its input only. Parameter names stay as they are.

    Call it before FSDP, so that gathers stay outside the region that runs twice. Blocks draw no random numbers, so
    no generator state is kept. Memory: one [B, S, D] per block instead of all its activations.
    """
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
