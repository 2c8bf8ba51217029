"""The plan of a run: one rank's step traced, replayed through the allocator, and timed on a described cluster.

Every part says what it is: an *estimate* comes from a formula, a *simulation* from the traced step. Each names the
assumption that it leans on most, and what it becomes where that is a tenth lower or higher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from amalthea.config.check import ResolvedRun, resolve
from amalthea.config.run import RunConfig
from amalthea.core.units import GIB
from amalthea.plan.accounting import Accounting, account
from amalthea.plan.allocator import MemoryReplay, Usage, replay
from amalthea.plan.budget import Budget, budget
from amalthea.plan.devices import device_cap_gib, gib, host_cap_bytes
from amalthea.plan.events import Trace
from amalthea.plan.fits import remedies_for_step
from amalthea.plan.optimizer_step import OptimizerPlan, plan_optimizer_step
from amalthea.plan.optimizer_time import StepEstimate, estimate_step
from amalthea.plan.setting import Code, Setting
from amalthea.plan.timeline import Sensitivity, Timeline

Say = Callable[[str], None]
LEANED_ON = ("matmul", "grouped", "attention", "hbm", "network", "intra_node", "host_link", "launch_s")
"""Assumptions of the timeline whose weight a plan looks at; the rest are latencies."""
CHANGE = 0.1


@dataclass(frozen=True)
class RunPlan:
    """Everything that `amalthea plan` says of one layout; `plan_run` makes it."""

    config: RunConfig
    setting: Setting
    resolved: ResolvedRun
    counted: Accounting
    trace: Trace
    memory: MemoryReplay
    other_allocator: MemoryReplay
    """The same without expandable segments, or with, where the plan is without."""
    timeline: Timeline
    sensitivities: tuple[Sensitivity, ...]
    """The heaviest first; none where the machine was measured and not described."""
    optimizer: OptimizerPlan
    optimizer_estimate: StepEstimate
    budget: Budget
    remedies: tuple[tuple[str, ...], ...]
    """Where it does not fit: overrides with which a lower bound does."""

    @property
    def usage(self) -> Usage:
        """Under the cap; where that runs out, the demand without."""
        return self.memory.demand if self.memory.capped is None or not self.memory.fits else self.memory.capped

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it does not fit, empty where it does."""
        found = []
        if not self.memory.fits:
            assert self.memory.capped is not None
            failure = self.memory.capped.out_of_memory
            assert failure is not None
            demand = self.memory.demand.peak_allocated
            found.append(
                f"device memory runs out in {failure.moment.phase.label}: the step allocates up to "
                f"{gib(demand.allocated_bytes):.1f} GiB, and the allocator may reserve "
                f"{device_cap_gib(self.setting.cluster, self.setting.reserves):.1f}"
            )
        host = host_cap_bytes(self.setting.cluster, self.setting.reserves)
        if self.memory.host_peak_bytes > host:
            found.append(f"host memory: {gib(self.memory.host_peak_bytes):.1f} GiB of {gib(host):.1f} for a rank")
        return tuple(found)

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before believing a figure."""
        found = list(self.problems)
        if self.usage.num_retries:
            found.append(f"the allocator retries {self.usage.num_retries} times in a step, waiting for the device")
        other, ours = self.other_allocator, self.memory
        if other.fits != ours.fits:
            switch = "with" if self.setting.expandable_segments else "without"
            held = gib(other.demand.peak_reserved.reserved_bytes)
            verdict = "runs out of memory" if ours.fits else "fits"
            setting = f"expandable_segments:{self.setting.expandable_segments}"
            found.append(
                f"memory as {switch} PYTORCH_CUDA_ALLOC_CONF={setting}; the other way it {verdict} "
                f"({held:.1f} GiB reserved)"
            )
        if self.setting.cluster.unverified:
            names = ", ".join(self.setting.cluster.unverified)
            found.append(f"not verified of {self.setting.cluster.name}: {names}")
        if self.setting.workload.document_tokens is None:
            found.append("one document fills each sequence, the dearest attention; give --document-tokens")
        if self.setting.workload.expert_load is None:
            found.append("experts are taken as perfectly balanced; give --expert-load to see another load")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Plain figures, ready for `json.dumps`: today's keys of `amalthea plan`, and those of the run."""
        return {
            "recipe": self.config.recipe,
            "seq_len": self.config.data.seq_len,
            "model": self.counted.to_json(),
            "layout": layout_json(self.config, self.resolved, self.setting),
            "memory": self._memory_json(),
            "optimizer": self._optimizer_json(),
            "timeline": self._timeline_json(),
            "budget": self.budget.to_json(),
            "warnings": list(self.warnings),
        }

    def _memory_json(self) -> dict[str, Any]:
        usage, at = self.usage, self.usage.peak_allocated
        return {
            "figures_are": "simulation",
            "fits": self.fits,
            "problems": list(self.problems),
            "would_fit": [list(overrides) for overrides in self.remedies],
            "allocated_gib": gib(at.allocated_bytes),
            "reserved_gib": gib(usage.peak_reserved.reserved_bytes),
            "stranded_gib": gib(usage.peak_reserved.stranded_bytes),
            "retries": usage.num_retries,
            "host_gib": gib(self.memory.host_peak_bytes),
            "cap_gib": device_cap_gib(self.setting.cluster, self.setting.reserves),
            "host_cap_gib": gib(host_cap_bytes(self.setting.cluster, self.setting.reserves)),
            "demand_gib": {
                "allocated": gib(self.memory.demand.peak_allocated.allocated_bytes),
                "reserved": gib(self.memory.demand.peak_reserved.reserved_bytes),
            },
            "peak_moment": at.phase.label,
            "reserved_peak_moment": usage.peak_reserved.phase.label,
            "by_class_gib": {name: gib(value) for name, value in at.by_class.items()},
            "stranded_by_stream_gib": {
                stream: gib(held.stranded_bytes) for stream, held in usage.peak_reserved.by_stream.items()
            },
            "expandable_segments": self.setting.expandable_segments,
            "reserved_gib_other_allocator": gib(self.other_allocator.demand.peak_reserved.reserved_bytes),
            "leans_on": {
                "assumption": "experts are loaded as stated, and evenly over layers",
                "sensitivity": f"a tenth more rows on this rank take up to {gib(at.pass_bytes) * CHANGE:.1f} GiB more",
            },
            "assumptions": [*self.setting.reserves.lines()],
        }

    def _optimizer_json(self) -> dict[str, Any]:
        figures, estimate = self.optimizer.to_json(), self.optimizer_estimate
        heaviest = max(estimate.parts, key=lambda part: part.seconds)
        return {
            "figures_are": "simulation",
            "step_s": self.timeline.optimizer_s,
            "bytes_sent": figures["bytes_sent"],
            "bytes_sent_by_part": figures["bytes_sent_by_part"],
            "estimate_s": estimate.step_s,
            "imbalance": figures["imbalance"],
            "leans_on": {
                "assumption": f"{heaviest.name}: {heaviest.basis}",
                "sensitivity": f"a tenth slower there: {heaviest.seconds * CHANGE:.3f} s more",
            },
        }

    def _timeline_json(self) -> dict[str, Any]:
        timeline = self.timeline
        document = timeline.to_json()
        return document | {
            "compute_s": timeline.compute_s,
            "exposed_comm_s": timeline.exposed_comm_s,
            "exposed_by_kind_s": {name: use.exposed_s for name, use in timeline.transfers.items()},
            "leans_on": self._step_leans_on(),
            "sensitivities": [{**vars(one), "swing_s": one.swing_s} for one in self.sensitivities],
        }

    def _step_leans_on(self) -> dict[str, str]:
        if not self.sensitivities:
            return {
                "assumption": "single operations and collectives, timed on this machine",
                "sensitivity": f"all a tenth slower: {self.timeline.step_s * CHANGE:.3f} s more",
            }
        heaviest = self.sensitivities[0]
        return {
            "assumption": f"{heaviest.assumption} = {heaviest.value:g}",
            "sensitivity": f"a tenth lower or higher: {heaviest.step_s_lower:.2f} or "
            f"{heaviest.step_s_higher:.2f} s per step",
        }


def layout_json(config: RunConfig, resolved: ResolvedRun, setting: Setting) -> dict[str, Any]:
    """Degrees, levers and the machine."""
    memory, parallel = config.memory, config.parallel
    return {
        "cluster": setting.cluster.name,
        "gpus": setting.num_gpus,
        "nodes": -(-setting.num_gpus // setting.cluster.gpus_per_node),
        "rank": setting.rank,
        "dp_replicate": resolved.dp_replicate,
        "dp_shard": resolved.dp_shard,
        "cp": resolved.cp,
        "ep": resolved.ep,
        "efsdp": resolved.efsdp,
        "dispatch": parallel.dispatch,
        "reduce_dtype": parallel.reduce_dtype,
        "sequences_per_rank": resolved.sequences_per_rank,
        "microbatch_sequences": resolved.microbatch_sequences,
        "accumulation_steps": resolved.accumulation_steps,
        "tokens_per_gpu": resolved.rank_tokens(config.data.seq_len),
        "recompute": memory.recompute,
        "blocks_per_group": memory.blocks_per_group,
        "sequences_per_gather": memory.sequences_per_gather,
        "offload": memory.offload,
        "offload_optimizer": memory.offload_optimizer,
        "offload_parameters": memory.offload_parameters,
        "unshard_async_op": memory.unshard_async_op,
        "document_tokens": setting.workload.document_tokens,
    }


def plan_run(
    config: RunConfig, setting: Setting, code: Code, *, tokens: int | None = None, say: Say = lambda text: None
) -> RunPlan:
    """Plans `config` on `setting`; `tokens` is for the budget, by default those of the run.

    `say` is told what is under way. Raises ConfigError where degrees, batch, workload or cluster contradict each
    other; that a run does not fit into memory is a result. Communication: none. Memory: about 0.5 GB for a trillion
    parameters. Time: about 30 s of one core for 74 layers, whatever the ranks.
    """
    setting.cluster.check_holds(setting.num_gpus)
    resolved = resolve(config, world_size=setting.num_gpus)
    say(f"tracing rank {setting.rank} of {setting.num_gpus:,}: {config.model.num_layers} layers")
    trace = setting.trace(config, code)
    say(f"replaying memory: {len(trace.events):,} events")
    memory = replay(trace, settings=setting.allocator)
    other = replay(trace, settings=setting.other_allocator)
    say("timing the step")
    simulator = setting.simulator(trace)
    assumptions = setting.assumptions_of(config)
    timeline = simulator.timeline(assumptions, model_flops_per_token=setting.model_flops_per_token(config))
    sensitivities: tuple[Sensitivity, ...] = ()
    if setting.stopwatch is None:
        sensitivities = simulator.sensitivity(assumptions, LEANED_ON, change=CHANGE)
    say("planning the optimizer's step")
    optimizer = plan_optimizer_step(config, num_gpus=setting.num_gpus)
    all_tokens = tokens or config.train.steps * config.train.global_batch_tokens
    plan = RunPlan(
        config=config,
        setting=setting,
        resolved=resolved,
        counted=account(
            config.model,
            seq_len=config.data.seq_len,
            document_len=setting.workload.document_tokens,
            optim=config.optim,
        ),
        trace=trace,
        memory=memory,
        other_allocator=other,
        timeline=timeline,
        sensitivities=sensitivities,
        optimizer=optimizer,
        optimizer_estimate=estimate_step(optimizer, config, setting.cluster),
        budget=budget(config, setting, tokens=all_tokens, step_s=timeline.step_s),
        remedies=(),
    )
    return plan if plan.fits else replace(plan, remedies=_remedies(plan))


def _remedies(plan: RunPlan) -> tuple[tuple[str, ...], ...]:
    peak = plan.memory.demand.peak_allocated
    return remedies_for_step(
        plan.config,
        plan.resolved,
        int(device_cap_gib(plan.setting.cluster, plan.setting.reserves) * GIB),
        host_cap_bytes(plan.setting.cluster, plan.setting.reserves),
        peak_bytes=peak.allocated_bytes,
        pass_bytes=peak.pass_bytes,
    )
