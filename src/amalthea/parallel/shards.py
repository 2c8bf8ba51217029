"""Where this rank's part of a DTensor lies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from amalthea.core.errors import PlacementError
from amalthea.core.tensors import local_tensor


class LocalPart(NamedTuple):
    """This rank's part of a parameter, sharing memory, and the global index where it begins, by dimension."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]


def local_part(name: str, parameter: nn.Parameter) -> LocalPart:
    """The part of a parameter that is sharded along any dimensions, or not at all.

    Experts are split over `ep` first and `efsdp` second, although the mesh names `efsdp` first; each split is
    `torch.chunk`'s. Communication: none. Raises PlacementError for a placement that is neither shard nor replica.
    """
    data = parameter.data
    local = local_tensor(data)
    starts, sizes = [0] * data.ndim, list(data.shape)
    if isinstance(data, DTensor):
        for axis in _split_order(name, data):
            dim = data.placements[axis].dim  # type: ignore[attr-defined]
            size, index = data.device_mesh.size(axis), data.device_mesh.get_local_rank(axis)
            chunk = -(-sizes[dim] // size)
            start = min(index * chunk, sizes[dim])
            starts[dim], sizes[dim] = starts[dim] + start, min(chunk, sizes[dim] - start)
    assert list(local.shape) == sizes, f"{name}: expected {sizes}, found {list(local.shape)}"
    return LocalPart(local, tuple(starts))


def _split_order(name: str, tensor: DTensor) -> list[int]:
    """Mesh axes that split the tensor, first split first: FSDP splits last what expert parallelism split before."""
    axes = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if not hasattr(placement, "dim"):
            raise PlacementError(f"{name} is placed as {tensor.placements}; shards and replicas were expected")
        axes.append((not isinstance(placement, Shard) or hasattr(placement, "split_factor"), axis))
    return [axis for _, axis in sorted(axes)]
