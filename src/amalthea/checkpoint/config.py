"""When to save, how many to keep, and whether to go on from what is there."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from amalthea.core.component import Component


class CheckpointConfig(Component):
    """Checkpoints in `RUN/checkpoints/step_N`."""

    every_steps: PositiveInt | None = 100
    """Save every so many steps; the last step is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` goes on from the newest whole checkpoint of the run folder; `never` refuses a folder that has one."""
