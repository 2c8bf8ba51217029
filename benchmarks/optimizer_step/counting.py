"""Counts collectives and the bytes that they send, whoever calls them.

All ways into torch's collectives (`torch.distributed`'s functions, functional collectives, DTensor) end in the
dispatcher's operations `c10d::…`, `_c10d_functional::…` or `_dtensor::…`, where a dispatch mode sees them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class CollectiveCounter(TorchDispatchMode):
    """While active, counts in `num_collectives` and `bytes_sent` what this rank starts, and by name in `by_name`.

    Bytes that leave this rank, with n ranks: all-reduce 2·(n − 1)/n of the tensor, reduce-scatter (n − 1)/n of the
    input, all-gather (n − 1) times the own part (both as rings do), all-to-all what is for others, gather the own
    tensor unless it is the root, scatter and broadcast what the root holds for others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_collectives, self.bytes_sent, self.by_name = 0, 0.0, dict[str, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it takes the operation apart, and its collectives come by here
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in _NAMESPACES and name not in _NO_COLLECTIVES:
            self.num_collectives += 1
            self.by_name[name] = self.by_name.get(name, 0) + 1
            self.bytes_sent += _bytes_sent(name, args)
        return result


def _bytes_sent(name: str, args: Any) -> float:
    rank, n = dist.get_rank(), dist.get_world_size()
    match name:
        case "alltoall_base_":
            splits = list(args[4]) or [len(args[1]) // n] * n
            return _size(args[1]) * (1 - splits[rank] / max(1, sum(splits)))
        case "allreduce_" | "all_reduce" | "all_reduce_":
            return 2 * (n - 1) / n * _size(args[0])
        case "_allgather_base_":
            return (n - 1) * _size(args[1])
        case "all_gather_into_tensor":
            return (n - 1) * _size(args[0])
        case "allgather_":
            return (n - 1) * _size(args[1])
        case "_reduce_scatter_base_":
            return (n - 1) / n * _size(args[1])
        case "reduce_scatter_tensor" | "shard_dim_alltoall":
            return (n - 1) / n * _size(args[0])
        case "gather_":
            return 0.0 if args[3] == rank else _size(args[1])
        case "scatter_":
            return (n - 1) / n * _size(args[1]) if args[3] == rank else 0.0
        case "broadcast_":
            return (n - 1) * _size(args[0]) if args[2] == rank else 0.0
    raise NotImplementedError(f"{name}: say how many bytes it sends")


def _size(tensors: Any) -> float:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_size(tensor) for tensor in tensors)
