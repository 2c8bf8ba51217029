"""The learning rate's factor over steps: a pure function."""

from __future__ import annotations

import math

from amalthea.optim.config import ScheduleConfig


def lr_factor(config: ScheduleConfig, *, step: int, total_steps: int) -> float:
    """Factor on the learning rate for optimizer step `step`, counted from 0.

    Rises linearly over the warmup, reaching 1 at its last step; then stays (`constant`), stays and falls linearly
    over the last `decay_fraction` of the run (`wsd`), or falls as a half cosine (`cosine`), to `min_factor` at the
    last step.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    start = config.warmup_steps
    if config.kind == "wsd":
        start = max(start, total_steps - round(config.decay_fraction * total_steps))
    progress = min(1.0, max(0.0, (step - start + 1) / max(1, total_steps - start)))
    if config.kind == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return 1.0 - (1.0 - config.min_factor) * progress
