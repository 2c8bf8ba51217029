"""What a plan is made for: the machine, the ranks, the work, and the code that will run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.plan.accounting import account
from amalthea.plan.allocator import AllocatorSettings
from amalthea.plan.clusters import Cluster
from amalthea.plan.devices import Reserves, device_cap_gib
from amalthea.plan.events import Trace
from amalthea.plan.step_speeds import FLASH_3, Assumptions
from amalthea.plan.stopwatch import Stopwatch
from amalthea.plan.timeline import Simulator
from amalthea.plan.trace import Workload, trace_step


@dataclass(frozen=True)
class Code:
    """The code whose step is traced: `train.build.build` and `train.step.train_step`."""

    build: Callable[..., Any]
    train_step: Callable[..., Any]


@dataclass(frozen=True)
class Setting:
    """A machine and the work of one rank on it."""

    cluster: Cluster
    num_gpus: int
    rank: int = 0
    workload: Workload = field(default_factory=Workload)
    assumptions: Assumptions = field(default_factory=Assumptions)
    reserves: Reserves = field(default_factory=Reserves)
    expandable_segments: bool = True
    stopwatch: Stopwatch | None = None
    """Measures what the trace consists of on this machine, whose cluster it then is."""

    @property
    def allocator(self) -> AllocatorSettings:
        """The allocator of such a rank, under its cap."""
        cap = device_cap_gib(self.cluster, self.reserves)
        return AllocatorSettings(expandable_segments=self.expandable_segments, cap_gib=cap)

    @property
    def other_allocator(self) -> AllocatorSettings:
        """The same without expandable segments, or with, where the setting is without."""
        return replace(self.allocator, expandable_segments=not self.expandable_segments)

    def assumptions_of(self, config: RunConfig) -> Assumptions:
        """With the speed of the attention kernels that `config` asks for. Raises ConfigError where they do not run."""
        if config.flash_attention != "fa3":
            return self.assumptions
        if not self.cluster.is_hopper:
            raise ConfigError(
                f"flash_attention is fa3, which needs a Hopper GPU (H100, H200, GH200), but {self.cluster.name} has "
                f"{self.cluster.gpu}; set flash_attention=auto or torch"
            )
        return replace(self.assumptions, attention=FLASH_3)

    def trace(self, config: RunConfig, code: Code) -> Trace:
        """One step of `config`. Host memory has no end here: what a step takes of it is compared afterwards."""
        return trace_step(
            config,
            rank=self.rank,
            world_size=self.num_gpus,
            build=code.build,
            train_step=code.train_step,
            workload=self.workload,
            node_ranks=min(self.cluster.gpus_per_node, self.num_gpus),
            gpu=self.stopwatch is None or self.stopwatch.device == "cuda",
            keep_calls=self.stopwatch is not None,
        )

    def simulator(self, trace: Trace) -> Simulator:
        """Of a step on this machine, after measuring its operations, or on a described one."""
        clocked = None if self.stopwatch is None else self.stopwatch.clock(trace)
        return Simulator(trace, self.cluster, clocked=clocked)

    def model_flops_per_token(self, config: RunConfig) -> int:
        """FLOP per token, forward and backward, over documents of the workload's length."""
        counted = account(config.model, seq_len=config.data.seq_len, document_len=self.workload.document_tokens)
        flops = counted.flops_per_token
        return (flops.documents or flops.full_causal).model_total
