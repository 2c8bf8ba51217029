"""One process that takes itself for a rank of many, on a device that it does not have.

Inside these contexts the training code runs as it is. What they replace, and why:
- the default process group, by torch's fake one;
- FSDP2's list of all ranks' shards of a parameter, made lazily: it is as long as the world, and one entry is read;
- axes of a mesh, which are looked up among ranks that must be real numbers;
- `tolist` of a fake tensor, which has no values;
- FSDP2's look at addresses, by which it sees whether a shard is padded already: fake tensors have none;
- `UntypedStorage.resize_`, by which FSDP2 frees and allocates gathered parameters, so that the recorder hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from amalthea.optim import build as optimizers
from amalthea.parallel.mesh import Mesh
from amalthea.plan.trace.recorder import Recorder
from amalthea.plan.trace.streams import TracedEvent
from amalthea.plan.trace.tracer import stand_in


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """A default process group of `size` ranks, of which this process is `rank`; nothing is sent.

    Raises RuntimeError where the process has a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a trace needs a process without a process group; run it beside training, not inside")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with (
            mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks),
            mock.patch.object(_fsdp_param.FSDPParam, "reset_sharded_param", _pad_once),
            mock.patch.object(DeviceMesh, "__getitem__", _axis_of_real_mesh),
        ):
            yield
    finally:
        dist.destroy_process_group()
        # DTensor would find the dead groups there under an equal mesh.
        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()


_pad = _fsdp_param.FSDPParam.reset_sharded_param
_axis_of_mesh = DeviceMesh.__getitem__


def _pad_once(shard: Any) -> None:
    parameter = getattr(shard._module_info.module, shard._module_info.param_name)
    padded, local = shard._sharded_param_data, parameter._local_tensor
    if isinstance(padded, FakeTensor) and padded.untyped_storage()._cdata == local.untyped_storage()._cdata:
        shard.sharded_param, shard._sharding_spec = parameter, parameter._spec
    else:
        _pad(shard)


def _axis_of_real_mesh(mesh: DeviceMesh, axes: Any) -> DeviceMesh:
    with _disable_current_modes():
        return _axis_of_mesh(mesh, axes)


class _Chunks(Sequence[torch.Tensor]):
    """`torch.chunk`, one chunk at a time; those past the end are empty."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num_chunks, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, index: Any) -> Any:
        length = self._tensor.shape[self._dim]
        size = -(-length // self._num_chunks)
        start, stop = min(index * size, length), min((index + 1) * size, length)
        if start == stop and index:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, stop - start)


def axes_of(mesh: Mesh) -> dict[str, str]:
    """The axis of each process group, by its name."""
    views = (
        *([(mesh.dispatch, ("node", "local"))] if mesh.dispatch is not None else []),
        (mesh.sequences, ("cp",)),
        (mesh.experts, ("efsdp", "ep")),
        (mesh.dense, ("dp_replicate", "fsdp")),
    )
    return {view.get_group(axis).group_name: axis for view, axes in views for axis in axes}


@contextmanager
def without_values(recorder: Recorder) -> Iterator[None]:
    """Reading a fake tensor waits for the device, and gives stand-ins."""

    def tolist(tensor: torch.Tensor) -> Any:
        wait_for_device(recorder)
        return _filled(tuple(tensor.shape), stand_in(tensor.dtype))

    # Hashing the plan of a large world takes seconds, and there is nobody to compare it with.
    with mock.patch.object(FakeTensor, "tolist", tolist), mock.patch.object(optimizers, "digest", return_value=0):
        yield


def wait_for_device(recorder: Recorder) -> None:
    """The processor waits until the current stream has done what it was given."""
    event = TracedEvent(recorder)
    event.record()
    event.synchronize()


def _filled(shape: tuple[int, ...], value: Any) -> Any:
    return value if not shape else [_filled(shape[1:], value) for _ in range(shape[0])]


@contextmanager
def followed_resizes(recorder: Recorder) -> Iterator[None]:
    """The recorder hears of storages that are resized."""
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def follow(storage: Any, size: int) -> Any:
        out = resize(storage, size)
        recorder.see_storage(storage, "resize_")
        return out

    with mock.patch.object(torch.UntypedStorage, "resize_", follow):
        yield
