"""What a number of tokens costs: GPU hours, wall clock in jobs of limited length, energy. An *estimate*."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from amalthea.config.run import RunConfig
from amalthea.core.units import GIB
from amalthea.plan.accounting import account
from amalthea.plan.setting import Setting


@dataclass(frozen=True)
class BudgetAssumptions:
    """Ours, unmeasured."""

    start_s: float = 300.0
    """From a job's start to its first step: imports, communicators, reading the checkpoint."""


@dataclass(frozen=True)
class Budget:
    """Cost of `tokens` tokens; `energy_mwh` is that of the GPUs at their cap, none where no cap is known."""

    tokens: int
    steps: int
    gpu_hours: float
    wall_clock_h: float
    """Of all jobs, without waiting in the queue."""
    jobs: int
    saves: int
    save_s: float
    """That a save holds training up: the copy of this rank's share to the host."""
    checkpoint_gib: float
    energy_mwh: float | None
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"figures_are": "estimate", **asdict(self)}


def budget(config: RunConfig, setting: Setting, *, tokens: int, step_s: float) -> Budget:
    """Steps of `step_s`, with saves and jobs' starts. `tokens` is rounded up to whole steps."""
    assumed, cluster = BudgetAssumptions(), setting.cluster
    steps = -(-tokens // config.train.global_batch_tokens)
    every = config.checkpoint.every_steps
    saves = steps // every if every else 0
    state = account(config.model, seq_len=config.data.seq_len, optim=config.optim).state_bytes
    ranks = setting.num_gpus // config.parallel.dp_replicate
    link = (cluster.host_link_gb_per_s or setting.assumptions.unknown_host_link_gb_per_s) * 1e9
    save_s = state.checkpoint / ranks / (link * setting.assumptions.host_link)
    working_s = steps * step_s + saves * save_s
    limit_s = math.inf if cluster.time_limit_h is None else cluster.time_limit_h * 3600
    usable_s = limit_s - assumed.start_s
    jobs = max(1, math.ceil(working_s / usable_s)) if usable_s > 0 else 0
    wall_s = working_s + jobs * assumed.start_s
    hours = wall_s / 3600
    watts = cluster.gpu_watts
    return Budget(
        tokens=tokens,
        steps=steps,
        gpu_hours=hours * setting.num_gpus,
        wall_clock_h=hours,
        jobs=jobs,
        saves=saves,
        save_s=save_s,
        checkpoint_gib=state.checkpoint / GIB,
        energy_mwh=None if watts is None else hours * setting.num_gpus * watts / 1e6,
        assumptions=(
            f"{assumed.start_s:g} s from a job's start to its first step (ours, unmeasured)",
            "a save holds training up while a rank's share is copied to the host, and is written beside the steps",
            "jobs save before their limit, so nothing is done twice; waiting in the queue and failures are not counted",
            "energy is that of the GPUs at their cap, without processors, network and cooling"
            if watts is not None
            else f"no power is known for {cluster.gpu}, so no energy",
        ),
    )
