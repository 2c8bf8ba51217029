"""Muon on one device: momentum, then orthogonalization, of matrices and of stacks of matrices.

The update of a matrix equals `torch.optim.Muon`'s; a stack [E, R, C] is E matrices. A parameter here is a tensor
that holds *whole* matrices: a plain parameter, or this rank's part of a stack that was sharded between matrices.

Shape legend: E matrices in a stack, R rows, C columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch

from amalthea.core.tensors import DTYPES
from amalthea.optim.config import MuonConfig
from amalthea.optim.newton_schulz import orthogonalize

_BATCH = 8
"""Equal 2-D matrices orthogonalized together."""


class Muon(torch.optim.Optimizer):
    """Momentum → Newton-Schulz → decoupled weight decay and update.

    Parameters are [R, C] or [E, R, C]; a projection that is orthogonalized per head is given as its heads' stack.
    State: `momentum`, in the configured dtype, made at once in the parameter's shape. Communication: none.
    Source: Keller Jordan (2024); update scale of Moonshot (arXiv 2502.16982).
    """

    def __init__(self, params: Iterable[torch.Tensor], *, config: MuonConfig) -> None:
        super().__init__(params, {"lr": config.lr})
        self.config = config
        dtype = DTYPES[config.momentum_dtype]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter, dtype=dtype)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None and p.numel()]
            directions = self._directions(parameters)
            for shape_parameters in _by_shape(parameters):
                for batch in _batches(shape_parameters):
                    self._update(batch, [directions[p] for p in batch], lr=group["lr"])

    def _directions(self, parameters: list[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Moves the momentum and returns what is to be orthogonalized; leaves gradients as they are."""
        if not parameters:
            return {}
        stored, mix = [self.state[p]["momentum"] for p in parameters], self.config.momentum
        momentum = [tensor.float() for tensor in stored]  # the stored ones themselves where they are fp32
        grads = [p.grad.to(torch.float32) for p in parameters if p.grad is not None]
        torch._foreach_lerp_(momentum, grads, 1 - mix)
        if self.config.momentum_dtype != "fp32":
            torch._foreach_copy_(stored, momentum)
        nesterov = torch._foreach_lerp(grads, momentum, mix) if self.config.nesterov else momentum
        return dict(zip(parameters, nesterov, strict=True))

    def _update(self, batch: list[torch.Tensor], directions: list[torch.Tensor], *, lr: float) -> None:
        config = self.config
        stack = directions[0] if len(batch) == 1 else torch.stack(directions)
        updates = orthogonalize(
            stack,
            num_steps=config.num_steps,
            coefficients=config.coefficients,
            form=config.form,
            products=config.products,
        )
        scale = update_scale(batch[0].shape[-2], batch[0].shape[-1], adjust_lr=config.adjust_lr)
        for parameter, update in zip(batch, [updates] if len(batch) == 1 else updates.unbind(), strict=True):
            parameter.mul_(1 - lr * config.weight_decay)
            parameter.add_(update, alpha=-lr * scale)


def update_scale(rows: int, columns: int, *, adjust_lr: str) -> float:
    """Factor on the learning rate of one matrix, as `torch.optim.Muon` names them."""
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _by_shape(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.shape].append(parameter)
    return list(groups.values())


def _batches(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Stacks are batches already; single matrices go several at a time."""
    size = 1 if parameters[0].ndim == 3 else _BATCH
    return [parameters[i : i + size] for i in range(0, len(parameters), size)]
