"""The gradient norm over every parameter, and scaling down to a limit.

Within one replica each rank holds another part of every parameter, dense ones by rows and experts by expert; so
one sum of squares over the replica's ranks is the norm of a single process, experts included.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from amalthea.core.tensors import local_tensor


@torch.no_grad()
def global_grad_norm(parameters: Iterable[torch.Tensor], *, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Euclidean norm of all gradients, an fp32 scalar, equal on every rank.

    `group` has the ranks that share one replica (`dp_shard`); none where every rank holds everything.
    Communication: one all-reduce of a scalar. Does not wait for the device.
    """
    grads = _local_grads(parameters)
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
    square = torch.stack(list(norms)).square().sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def scale_grads(parameters: Iterable[torch.Tensor], *, norm: torch.Tensor, max_norm: float) -> None:
    """Multiplies every gradient by min(1, max_norm / norm)."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(_local_grads(parameters), factor)


def _local_grads(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [local_tensor(p.grad) for p in parameters if p.grad is not None]
