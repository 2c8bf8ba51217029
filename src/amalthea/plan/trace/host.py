"""Parameters and gradients that rest in host memory, in a trace whose device is the host as well.

There FSDP2 copies nothing. Inside `resting_on_host` it does as beside a GPU: a unit's shards are copied into new memory
of the device where they are gathered, and reduced gradients to the host, where they are waited for at the end of
backward, or at once where they are added to earlier ones. What the host itself adds takes no time here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from amalthea.core.tensors import local_tensor
from amalthea.plan.events import Copy
from amalthea.plan.trace.copies import TracedCopies
from amalthea.plan.trace.recorder import Recorder
from amalthea.plan.trace.streams import TracedStream


def rest_parameters(recorder: Recorder, copies: TracedCopies, model: nn.Module) -> None:
    """Takes a built model's parameters for host memory, with as much for their gradients."""
    for parameter in model.parameters():
        shard = local_tensor(parameter.data)
        recorder.disown(shard)
        for _ in ("parameter", "gradient"):
            copies.hold(shard.untyped_storage().nbytes())


@contextmanager
def resting_on_host(recorder: Recorder, copies: TracedCopies) -> Iterator[None]:
    """Inside, FSDP2's copies to and from the host are written down."""
    inputs = cast("Callable[[FSDPParam], list[torch.Tensor]]", cast(Any, FSDPParam.all_gather_inputs).fget)
    reduce = fsdp.foreach_reduce

    def arrived(shard: FSDPParam) -> list[torch.Tensor]:
        if shard.sharded_state != ShardedState.SHARDED:
            return inputs(shard)
        resting = shard._sharded_param_data
        shard._sharded_param_data = torch.empty_like(resting)
        recorder.write(Copy("to_device", resting.numel() * resting.element_size(), recorder.stream))
        try:
            return inputs(shard)
        finally:
            shard._sharded_param_data = resting

    @wraps(reduce)
    def left(shards: list[FSDPParam], *args: Any) -> Any:
        before = [shard.sharded_param.grad for shard in shards]
        for shard in shards:
            shard.sharded_param.grad = None
        out = reduce(shards, *args)
        stream = cast(TracedStream, out[2])
        for shard, earlier in zip(shards, before, strict=True):
            grad = local_tensor(cast(torch.Tensor, shard.sharded_param.grad))
            recorder.write(Copy("to_host", grad.numel() * grad.element_size(), stream.name))
            if earlier is None:
                shard.grad_offload_event = cast(Any, stream.record_event())
                earlier = shard.to_sharded_dtensor(copies.on_host(grad))
            else:
                stream.record_event().synchronize()
            shard.sharded_param.grad = earlier
        return out

    with (
        mock.patch.object(FSDPParam, "all_gather_inputs", property(arrived)),
        mock.patch.object(fsdp, "foreach_reduce", left),
    ):
        yield
