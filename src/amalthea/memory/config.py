"""What is kept, recomputed or moved away."""

from __future__ import annotations

from typing import Literal

from amalthea.core.component import Component


class MemoryConfig(Component):
    """Activation memory."""

    recompute: Literal["none", "block"] = "none"
    """`block` keeps only each block's input and runs the block again in backward."""
