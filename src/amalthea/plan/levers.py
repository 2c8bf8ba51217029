"""The ladder of levers: what each step from a plain layout to a good one is worth, one after the other.

For the reference model it starts where the published run did (FACTS §4's reading: 8,192 tokens per GPU and step, and an
optimizer that gathers experts), with the optimizer's seconds as `plan/optimizer_published.py` estimates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from amalthea.config.check import resolve
from amalthea.config.overrides import apply_overrides
from amalthea.config.run import RunConfig
from amalthea.core.units import GIB
from amalthea.plan.devices import host_cap_bytes
from amalthea.plan.optimizer_published import is_reference, published_estimates
from amalthea.plan.setting import Code, Setting
from amalthea.plan.sketch import Sketch, sketch


@dataclass(frozen=True)
class Lever:
    """One change on top of all before it. `optimizer_s` stands for the optimizer's part where it is not ours."""

    name: str
    overrides: tuple[str, ...] = ()
    optimizer_s: float | None = None


@dataclass(frozen=True)
class Rung:
    """A lever pulled, and the step then."""

    lever: Lever
    overrides: tuple[str, ...]
    """All until here."""
    sketch: Sketch

    @property
    def step_s(self) -> float:
        """With the optimizer's part replaced where the lever says so."""
        instead = self.lever.optimizer_s
        return self.sketch.step_s if instead is None else self.sketch.step_s_with(instead)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.sketch.tokens / self.step_s

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.lever.name,
            "overrides": list(self.overrides),
            **self.sketch.to_json(),
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "optimizer_s": self.sketch.optimizer_s if self.lever.optimizer_s is None else self.lever.optimizer_s,
        }


def ladder(
    config: RunConfig, setting: Setting, code: Code, *, say: Callable[[str], None] = lambda text: None
) -> tuple[Rung, ...]:
    """Pulls every lever in turn. Raises ConfigError as `plan_run` does. Time: about 6 s of one core for each."""
    rungs: list[Rung] = []
    overrides: tuple[str, ...] = ()
    for lever in levers(config, setting):
        overrides = (*overrides, *lever.overrides)
        say(f"ladder {lever.name}")
        # A lever of the optimizer alone leaves the trace as it was.
        drawn = rungs[-1].sketch if rungs and not lever.overrides else None
        drawn = drawn or sketch(apply_overrides(config, overrides), setting, code)
        rungs.append(Rung(lever, overrides, drawn))
    return tuple(rungs)


def levers(config: RunConfig, setting: Setting) -> Iterator[Lever]:
    """In the order in which they are pulled; the first is the plain layout."""
    seq_len = config.data.seq_len
    plain: tuple[str, ...] = (
        "kernels=eager",
        "flash_attention=torch",
        "memory.unshard_async_op=false",
        "memory.sequences_per_gather=1",
        "parallel.dispatch_chunks=1",
        "parallel.reduce_dtype=fp32",
    )
    offload = ("memory.recompute=block", "memory.offload=true")
    if is_reference(config.model) and seq_len > 8192:
        # From where the published run began, whatever the layout that is being planned.
        plain += (
            "parallel.cp=1",
            "train.microbatch_sequences=1",
            "memory.blocks_per_group=1",
            "memory.loss_budget_gib=none",
            "memory.offload_budget_gib=none",
        )
        batch = seq_len * setting.num_gpus
        before, after = (one.estimated_s for one in published_estimates(config.model))
        short = ("data.seq_len=8192", f"train.global_batch_tokens={8192 * setting.num_gpus}")
        yield Lever(
            "8,192 tokens per GPU and step; experts are gathered to be orthogonalized",
            (*plain, *short, "memory.recompute=block"),
            before,
        )
        yield Lever("experts stay whole; dense matrices are repeated on every rank", (), after)
        yield Lever(
            f"{seq_len:,} tokens per GPU and step, boundaries in host memory",
            (*offload, f"data.seq_len={seq_len}", f"train.global_batch_tokens={batch}"),
            after,
        )
        yield Lever("unshard_async_op", ("memory.unshard_async_op=true",), after)
        yield Lever("every dense matrix has one owner")
        config = apply_overrides(config, (*plain, *offload, f"train.global_batch_tokens={batch}"))
    else:
        yield Lever("recompute, FSDP2's streams, gradients in fp32", (*plain, "memory.recompute=block"))
        yield Lever("unshard_async_op", ("memory.unshard_async_op=true",))
    yield Lever("gradients reduced in bf16", ("parallel.reduce_dtype=bf16",))
    yield from _larger_steps(config, setting)
    if config.parallel.ep > 1:
        yield Lever("rows travel in chunks, one while another is computed", ("parallel.dispatch_chunks=2",))
    yield Lever("fused kernels", ("kernels=fused",))
    if setting.cluster.is_hopper:
        yield Lever("FlashAttention-3", ("flash_attention=fa3",))


def _larger_steps(config: RunConfig, setting: Setting) -> Iterator[Lever]:
    """More tokens under each gather: passes as large as now, of sequences that a node shares where there is a host to
    hold their boundaries, and twice the batch."""
    resolved = resolve(config, world_size=setting.num_gpus)
    per_node, passes = min(setting.cluster.gpus_per_node, resolved.dp_shard * resolved.cp), 2
    sequences, budget = resolved.microbatch_sequences, ()
    shares = resolved.cp == 1 < per_node and config.data.seq_len % per_node == 0 and config.memory.offload
    if shares:
        # Each rank holds half a sequence a pass: what a block needs beside its boundary is half as much.
        sequences, passes = max(1, sequences * per_node // 2), 4
        budget_gib = int(host_cap_bytes(setting.cluster, setting.reserves) / GIB)
        budget = (f"memory.offload_budget_gib={budget_gib}",)
        shared = (f"parallel.cp={per_node}", f"train.microbatch_sequences={sequences}", "memory.sequences_per_gather=2")
        yield Lever("sequences shared inside a node, in two passes of half the tokens", shared)
    doubled = (
        f"memory.sequences_per_gather={passes}",
        f"train.microbatch_sequences={sequences}",
        f"train.global_batch_tokens={2 * config.train.global_batch_tokens}",
    )
    yield Lever(f"twice the batch, {passes} passes under each gather", (*doubled, *budget))
