"""Where this rank's part of a DTensor lies."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from amalthea.core.errors import PlacementError


def local_rows(name: str, parameter: nn.Parameter) -> tuple[torch.Tensor, int, int]:
    """(local tensor, its first global row, global rows) of a parameter that is sharded by rows or not at all.

    Experts are split over `ep` first and `efsdp` second, although the mesh names `efsdp` first; each split is
    `torch.chunk`'s. Communication: none. Raises PlacementError for any other placement.
    """
    data = parameter.data
    if not isinstance(data, DTensor):
        return data, 0, data.shape[0]
    first, rows = 0, data.shape[0]
    for axis in _split_order(name, data):
        size, index = data.device_mesh.size(axis), data.device_mesh.get_local_rank(axis)
        chunk = -(-rows // size)
        start = min(index * chunk, rows)
        first, rows = first + start, min(chunk, rows - start)
    local = data.to_local()
    assert local.shape[0] == rows, f"{name}: expected {rows} local rows, found {local.shape[0]}"
    return local, first, data.shape[0]


def _split_order(name: str, tensor: DTensor) -> list[int]:
    """Mesh axes that split rows, first split first: FSDP splits last what expert parallelism split before."""
    axes = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if getattr(placement, "dim", None) != 0:
            raise PlacementError(f"{name} is placed as {tensor.placements}; rows (Shard(0)) were expected")
        axes.append((not isinstance(placement, Shard) or hasattr(placement, "split_factor"), axis))
    return [axis for _, axis in sorted(axes)]
