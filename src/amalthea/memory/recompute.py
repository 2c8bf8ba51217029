"""Running a block again in backward instead of keeping its activations: all of it, or all but what costs most.

*Selective* recompute keeps the outputs of some operations beside the input and takes them from there when the block
runs again. What runs again then costs little, and what is kept is less than everything: attention costs 2·S FLOP for
each number that it returns, a matrix product 2·D, the rest about one.

An all-to-all can be kept as well, so that tokens travel no more often than without recompute.

Shape legend: B sequences, S tokens, D hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from amalthea.kernels.saved import results_count
from amalthea.memory.config import Kept
from amalthea.model.blocks import BlockGroup
from amalthea.model.transformer import Transformer

_aten = torch.ops.aten
_ALL_TO_ALL = torch.ops.c10d.alltoall_base_.default
_OPERATIONS: dict[Kept, tuple[Any, ...]] = {
    "attention": (
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        varlen._varlen_attn._opoverload,
    ),
    "projections": (_aten.mm.default, _aten.mm.dtype, _aten.addmm.default, _aten.bmm.default),
    "experts": (_aten._grouped_mm.default,),
    "all_to_all": (),  # in place, so by a way of its own
}

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def apply_recompute(model: Transformer, *, keep: Collection[Kept] = ()) -> None:
    """Makes every group of blocks keep its input only, and what the operations named by `keep` return.

    Parameter names stay as they are. Gathers stay outside the region that runs twice. Blocks draw no random numbers, so
    no generator state is kept. Memory: one [B, S, D] per group, and the outputs kept, instead of all activations.
    Communication: with experts on several ranks, backward repeats the all-to-alls of forward unless they are kept.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if keep:
        options["context_fn"] = _contexts(keep)
    for group in model.groups:
        assert isinstance(group, BlockGroup)
        group.runner = partial(checkpoint, group.runner, **options)


def _contexts(keep: Collection[Kept]) -> Callable[[], Contexts]:
    """What `checkpoint` enters around its first run and around its second, made anew for each pass."""
    operations = frozenset(operation for name in keep for operation in _OPERATIONS[name])

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operation in operations and results_count()
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def make() -> Contexts:
        first, second = create_selective_checkpoint_contexts(policy) if operations else (None, None)
        if "all_to_all" not in keep:
            assert first is not None
            assert second is not None
            return first, second
        received: deque[torch.Tensor] = deque()
        return _around(first, _KeepReceived(received)), _around(second, _GiveReceived(received))

    return make


@contextmanager
def _around(inner: AbstractContextManager[Any] | None, outer: AbstractContextManager[Any]) -> Iterator[None]:
    """`outer` below `inner`: torch's contexts know each operation of the first run, and would not know its copies."""
    with outer:
        if inner is None:
            yield
        else:
            with inner:
                yield


class _KeepReceived(TorchDispatchMode):
    """Notes what each all-to-all receives. The tensor may be filled later; it is only looked at in backward."""

    def __init__(self, received: deque[torch.Tensor]) -> None:
        super().__init__()
        self.received = received

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _ALL_TO_ALL and results_count():
            # An alias: the tensor itself will carry the graph, which would hold this list, which would hold it.
            self.received.append(args[0].detach())
        return out


class _GiveReceived(TorchDispatchMode):
    """Fills the target of each all-to-all from what came the first time; nothing is sent."""

    def __init__(self, received: deque[torch.Tensor]) -> None:
        super().__init__()
        self.received = received

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _ALL_TO_ALL:
            return func(*args, **(kwargs or {}))
        args[0].copy_(self.received.popleft())
        return FakeWork().boxed()  # work that is done
