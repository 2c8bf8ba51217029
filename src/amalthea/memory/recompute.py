"""Running a block again in backward instead of keeping its activations."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from amalthea.model.blocks import BlockGroup
from amalthea.model.transformer import Transformer


def apply_recompute(model: Transformer) -> None:
    """Makes every group of blocks keep its input only. Parameter names stay as they are.

    Gathers stay outside the region that runs twice. Blocks draw no random numbers, so no generator state is kept.
    Memory: one [B, S, D] per group instead of all its activations.
    """
    for group in model.groups:
        assert isinstance(group, BlockGroup)
        group.runner = partial(checkpoint, group.runner, use_reentrant=False, preserve_rng_state=False)
