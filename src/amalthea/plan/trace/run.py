"""From a configuration to a trace."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from amalthea.config.check import ResolvedRun, resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.world import World
from amalthea.data.batch import Batch
from amalthea.plan.events import COMPUTE, Copy, Trace
from amalthea.plan.trace.calls import CallBook
from amalthea.plan.trace.collectives import Collectives
from amalthea.plan.trace.copies import TracedCopies
from amalthea.plan.trace.gpu import gpu_code
from amalthea.plan.trace.host import rest_parameters, resting_on_host
from amalthea.plan.trace.phases import classified_fsdp, classify_resident, watch, watched_backward
from amalthea.plan.trace.recorder import Recorder
from amalthea.plan.trace.routing import inject_splits
from amalthea.plan.trace.streams import traced_streams
from amalthea.plan.trace.tracer import Tracer
from amalthea.plan.trace.workload import Workload
from amalthea.plan.trace.world import (
    axes_of,
    fake_world,
    followed_resizes,
    without_values,
)


def trace_step(
    config: RunConfig,
    *,
    rank: int,
    world_size: int,
    build: Callable[..., Any],
    train_step: Callable[..., Any],
    workload: Workload | None = None,
    gpu: bool = True,
    node_ranks: int = 1,
    host_bytes: int | None = None,
    keep_calls: bool = False,
) -> Trace:
    """Runs `build` and two steps as rank `rank` of `world_size` and returns what the second one does.

    `build` and `train_step` are those of `train`. With `gpu` the code chooses kernels and buffers as on a GPU, else as
    on a CPU. `node_ranks` is how many ranks a node has, and `host_bytes` the host memory that a rank may take, by
    default any. `keep_calls` keeps each different call of an operation, to be timed. The gradient norm counts as too
    large, so that gradients are scaled. The process must have no process group. Communication: none. Memory: shapes
    only. Raises ConfigError where the configuration does not fit the ranks, or the workload the model.
    """
    workload = workload or Workload()
    workload.check(config)
    resolved = resolve(config, world_size=world_size)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}, but the ranks of this run are 0 to {world_size - 1}")
    recorder, mode = Recorder(), FakeTensorMode(allow_non_fake_inputs=True)
    copies = TracedCopies(recorder, mode)
    per_token = workload.attention_pairs(config.data.seq_len)
    collectives = Collectives(recorder)
    calls = CallBook() if keep_calls else None
    tracer = Tracer(recorder, collectives, pairs=lambda tokens: tokens * per_token, mode=mode, calls=calls)
    with ExitStack() as stack:
        for context in (
            fake_world(rank, world_size),
            traced_streams(recorder),
            classified_fsdp(recorder),
            followed_resizes(recorder),
            *([resting_on_host(recorder, copies)] if config.memory.offload_parameters else []),
            without_values(recorder),
            tracer.without_imagined(),
            *([gpu_code(recorder)] if gpu else []),
            _fake_from_first_memory(stack, mode, tracer),
        ):
            stack.enter_context(context)
        run = build(
            config,
            resolved,
            World(rank=rank, size=world_size, local_rank=rank % node_ranks, local_size=node_ranks),
            copies=copies,
            host_bytes=sys.maxsize if host_bytes is None else host_bytes,
        )
        if config.memory.offload_parameters:
            rest_parameters(recorder, copies, run.model)
        collectives.axes |= axes_of(run.mesh)
        stack.enter_context(watched_backward(recorder, lambda: run.model))
        watch(recorder, run, recompute=config.memory.recompute != "none")
        inject_splits(
            recorder,
            run.model,
            config,
            workload,
            num_tokens=resolved.pass_tokens(config.data.seq_len),
            ep_rank=run.mesh.experts.get_local_rank("ep"),
        )

        def step() -> None:
            recorder.enter("forward", memory="other")
            batches = [_batch(recorder, config, resolved, workload) for _ in range(resolved.accumulation_steps)]
            recorder.enter("forward", memory="activations")
            train_step(run, batches, lr_factor=1.0, tallies=())

        if gpu:
            _gather_once(run.model)
        else:
            step()
        with _settled_memory():
            classify_resident(recorder, run)
            recorder.start()
            for held in copies.host:
                recorder.write(held)
            step()
        resident, events = recorder.stop()
    seen = () if calls is None else tuple(calls.calls)
    return Trace(rank, world_size, resolved.rank_tokens(config.data.seq_len), resident, events, seen)


@contextmanager
def _fake_from_first_memory(stack: ExitStack, mode: FakeTensorMode, tracer: Tracer) -> Iterator[None]:
    """Enters the modes where the model, on the meta device until then, is given memory.

    Before it, meshes are made, whose ranks must be real numbers.
    """
    to_empty = nn.Module.to_empty

    def fake(module: nn.Module, **kwargs: Any) -> nn.Module:
        stack.enter_context(mode)
        stack.enter_context(tracer)
        return to_empty(module, **kwargs)

    with mock.patch.object(nn.Module, "to_empty", fake):
        yield


def _gather_once(model: nn.Module) -> None:
    """Has FSDP2 make what it makes in a first step and keeps: its streams, and each unit's gathered parameters.

    On a GPU nothing else of a first step stays; on a CPU scratch buffers do.
    """
    if not isinstance(model, FSDPModule):
        return
    model._get_fsdp_state()._lazy_init()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


@contextmanager
def _settled_memory() -> Iterator[None]:
    """Inside, memory is freed by reference counts alone, as it is while a step runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _batch(recorder: Recorder, config: RunConfig, resolved: ResolvedRun, workload: Workload) -> Batch:
    """A batch of which this rank's positions have just been copied to the device."""
    batch = workload.batch(resolved.gather_sequences, config.data.seq_len)
    for tensor in (batch.tokens, batch.labels):
        recorder.write(Copy("to_device", tensor.numel() * tensor.element_size() // resolved.cp, COMPUTE))
    return batch
