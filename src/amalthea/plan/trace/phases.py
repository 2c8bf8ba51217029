"""Which part of the step is running, and what the memory that it allocates is for.

Everything is seen from outside: hooks on the model's modules and on their outputs' gradients, and wrappers around
FSDP2's functions and the optimizers' methods. The code that runs is that of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.utils._pytree import tree_leaves

from amalthea.core.tensors import local_tensor
from amalthea.model.blocks import Block, BlockGroup
from amalthea.model.transformer import Transformer
from amalthea.optim.build import Optimizers
from amalthea.plan.events import MemoryClass
from amalthea.plan.trace.recorder import Recorder


class TracedRun(Protocol):
    """Of what `build` returns, what a trace looks at."""

    @property
    def model(self) -> Transformer: ...

    @property
    def optimizers(self) -> Optimizers: ...


def watch(recorder: Recorder, run: TracedRun, *, recompute: bool) -> None:
    """Makes forward, backward, recompute and the optimizer's phases known, by block group. Call it once, after FSDP."""
    first = 0
    for group in run.model.groups:
        assert isinstance(group, BlockGroup)
        last = first + len(group.blocks) - 1
        where = f"blocks.{first}" if first == last else f"blocks.{first}-{last}"
        _watch_forward(recorder, group, where, boundary=recompute)
        for block in group.blocks:
            assert isinstance(block, Block)
            _watch_recompute(recorder, block, where)
        first = last + 1
    _watch_forward(recorder, run.model.embed, "embed")
    _watch_forward(recorder, run.model.head, "head")
    _watch_optimizers(recorder, run.optimizers)


def _watch_forward(recorder: Recorder, module: nn.Module, where: str, *, boundary: bool = False) -> None:
    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        recorder.enter("forward", where, memory="activations")
        if boundary:
            recorder.classify(args[0], "boundaries")

    def backward(grad: torch.Tensor) -> None:
        recorder.enter("backward", where, memory="activations")

    def produced(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(backward)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recorder.enter("forward", memory="activations")

    # Around FSDP2's own hooks, so that the gathers of a unit are among its phase.
    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(produced, prepend=True)
    module.register_forward_hook(after)


def _watch_recompute(recorder: Recorder, block: nn.Module, where: str) -> None:
    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if recorder.phase.name == "backward":
            recorder.enter("recompute", where, memory="recomputed")

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if recorder.phase.name == "recompute":
            recorder.enter("backward", where, memory="activations")

    block.register_forward_pre_hook(before)
    # A checkpoint leaves its region by an exception once it has what it needs.
    block.register_forward_hook(after, always_call=True)


def _watch_optimizers(recorder: Recorder, optimizers: Optimizers) -> None:
    def during(owner: Any, method: str, where: str, *, then: str | None = None) -> None:
        call = getattr(owner, method)

        @wraps(call)
        def inside(*args: Any, **kwargs: Any) -> Any:
            recorder.enter("optimizer", where, memory="optimizer")
            out = call(*args, **kwargs)
            if then is not None:
                recorder.enter("optimizer", then, memory="optimizer")
            return out

        setattr(owner, method, inside)

    during(optimizers, "reduce_over_replicas", "reduce", then="")
    during(optimizers, "grad_norm", "norm", then="")
    during(optimizers, "scale_grads", "clip", then="")
    if (muon := optimizers.muon) is not None:
        during(muon, "step", "muon", then="")
        during(muon.exchange, "launch_to_owners", "launch", then="muon")
        during(muon.exchange, "finish_to_owners", "finish", then="muon")
        during(muon.exchange, "launch_back", "launch", then="muon")
        during(muon.exchange, "finish_back", "finish", then="muon")
        during(muon, "_orthogonalize", "newton_schulz", then="muon")
    if optimizers.adamw is not None:
        during(optimizers.adamw, "step", "adamw", then="")


@contextmanager
def classified_fsdp(recorder: Recorder) -> Iterator[None]:
    """Inside, FSDP2's buffers are classed as what they are."""

    def inside(call: Callable[..., Any], memory: MemoryClass) -> Callable[..., Any]:
        @wraps(call)
        def allocating(*args: Any, **kwargs: Any) -> Any:
            with recorder.allocating(memory):
                return call(*args, **kwargs)

        return allocating

    def reduce(fsdp_params: Any, unsharded_grads: list[torch.Tensor], *args: Any) -> Any:
        for grad in unsharded_grads:
            recorder.classify(grad, "gradients")
        return buffers(fsdp_params, unsharded_grads, *args)

    buffers = inside(fsdp.foreach_reduce, "communication")
    gathered = inside(fsdp.FSDPParamGroup.wait_for_unshard, "gathered")
    with (
        mock.patch.object(fsdp, "foreach_all_gather", inside(fsdp.foreach_all_gather, "communication")),
        mock.patch.object(fsdp, "foreach_reduce", reduce),
        mock.patch.object(fsdp.FSDPParamGroup, "wait_for_unshard", gathered),
    ):
        yield


@contextmanager
def watched_backward(recorder: Recorder, model: Callable[[], nn.Module]) -> Iterator[None]:
    """Inside, `backward()` is a phase, and what it leaves in `.grad` is classed as gradients."""
    backward = torch.Tensor.backward

    def inside(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        recorder.enter("backward", memory="activations")
        backward(tensor, *args, **kwargs)
        for parameter in model().parameters():
            if parameter.grad is not None:
                recorder.classify(local_tensor(parameter.grad), "gradients")
        recorder.enter("forward", memory="activations")

    with mock.patch.object(torch.Tensor, "backward", inside):
        yield


def classify_resident(recorder: Recorder, run: TracedRun) -> None:
    """Parameters and the optimizers' state; the rest of what is resident keeps its class."""
    for parameter in run.model.parameters():
        recorder.classify(local_tensor(parameter.data), "parameters")
    optimizers = run.optimizers
    if optimizers.muon is not None:
        for momentum in optimizers.muon.momenta.values():
            recorder.classify(momentum, "optimizer")
    if optimizers.adamw is not None:
        for state in optimizers.adamw.state.values():
            for value in state.values():
                recorder.classify(value, "optimizer")
