"""The machine that a plan is for: a preset, a file, or the one that the plan is made on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from amalthea.core.errors import ConfigError
from amalthea.plan.clusters import Cluster
from amalthea.plan.clusters_file import find_cluster
from amalthea.plan.measure import THIS, measure_this
from amalthea.plan.step_speeds import Assumptions
from amalthea.plan.stopwatch import Stopwatch

_MOST_PROCESSES = 16
"""On the cores of one host; each takes 0.3 GB and competes with the others."""


@dataclass(frozen=True)
class Machine:
    """A cluster, what is assumed of it, and for this machine what measures on it."""

    cluster: Cluster
    assumptions: Assumptions = field(default_factory=Assumptions)
    stopwatch: Stopwatch | None = None

    @property
    def is_cpu(self) -> bool:
        return self.stopwatch is not None and self.stopwatch.device == "cpu"


@contextmanager
def open_machine(name: str, *, num_gpus: int, device: str = "auto", threads: int | None = None) -> Iterator[Machine]:
    """A preset by name, a file that ends in `.toml`, or `this`: measured, with a process for each of `num_gpus`.

    For `this`, `device` is the run's, and `threads` those of each rank, as `launch.world.threads_of_ranks` tells.
    Raises ConfigError: no such cluster, fewer GPUs than that, or no measurement.
    """
    if name != THIS:
        cluster = find_cluster(name)
        cluster.check_holds(num_gpus)
        yield Machine(cluster)
        return
    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    most, what = (torch.cuda.device_count(), "GPUs") if on_gpu else (_MOST_PROCESSES, "processes that can be measured")
    if num_gpus > most:
        raise ConfigError(f"this machine has {most} {what}, fewer than {num_gpus:,}; take fewer with --gpus")
    with Stopwatch(num_gpus, device="cuda" if on_gpu else "cpu", threads=threads) as stopwatch:
        cluster, assumptions = measure_this(stopwatch)
        yield Machine(cluster, assumptions, stopwatch)
