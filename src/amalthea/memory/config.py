"""What is kept, recomputed or moved away."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from amalthea.core.component import Component


class MemoryConfig(Component):
    """Activation memory."""

    recompute: Literal["none", "block"] = "none"
    """`block` keeps only the input of each group of blocks and runs the group again in backward."""
    blocks_per_group: PositiveInt = 1
    """Consecutive blocks that are gathered, and by choice recomputed, as one."""
    sequences_per_gather: PositiveInt = 1
    """Microbatches that pass through a group one after the other, under one gather of its parameters."""
