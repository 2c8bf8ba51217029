"""Who optimizes what, and one object that steps them all.

Optimizers work on the *local* part of each parameter, so that DTensor adds nothing to a step; the state is held in
DTensors of the parameter's placement, whose local parts the optimizers see. So a checkpoint finds state by parameter
name, in a form that reshards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from amalthea.core.errors import PlacementError
from amalthea.core.tensors import local_tensor
from amalthea.optim.config import OptimConfig
from amalthea.optim.muon import Muon

OptimizerName = Literal["muon", "adamw"]


@dataclass(frozen=True)
class Assignment:
    """Which optimizer takes a parameter, and why."""

    name: str
    shape: tuple[int, ...]
    optimizer: OptimizerName
    reason: str


def assign(name: str, shape: torch.Size, config: OptimConfig) -> Assignment:
    """Decides by name: routed experts, other hidden matrices, everything else (AdamW)."""
    optimizer: OptimizerName = "adamw"
    if ".experts." in name:
        optimizer, reason = config.experts, "routed expert"
    elif name.startswith(("embed.", "head.")):
        reason = "embedding or head"
    elif ".router." in name:
        reason = "router"
    elif len(shape) == 2:
        optimizer, reason = config.matrices, "hidden matrix"
    else:
        reason = "vector"
    return Assignment(name, tuple(shape), optimizer, reason)


class Optimizers:
    """All optimizers of a model, stepped together.

    Raises PlacementError where Muon is to take a matrix of which this rank holds a part only.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> None:
        self.parameters = dict(named_parameters)
        self.assignments = [assign(name, p.shape, config) for name, p in self.parameters.items()]
        self._locals = {name: nn.Parameter(local_tensor(p.data)) for name, p in self.parameters.items()}
        self._state: dict[str, torch.Tensor] = {}
        self._base_lr = {"muon": config.muon.lr, "adamw": config.adamw.lr}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        if names := self._names("muon"):
            for name in names:
                _check_whole_matrices(name, self.parameters[name])
            muon = Muon([self._locals[name] for name in names], config=config.muon)
            self._adopt(muon, names, ("momentum",))
            self._optimizers["muon"] = muon
        if names := self._names("adamw"):
            adamw = _build_adamw(config, {name: self._locals[name] for name in names})
            self._adopt(adamw, names, ("exp_avg", "exp_avg_sq", "step"))
            self._optimizers["adamw"] = adamw

    def _names(self, optimizer: OptimizerName) -> list[str]:
        return [a.name for a in self.assignments if a.optimizer == optimizer]

    def _adopt(self, optimizer: torch.optim.Optimizer, names: list[str], keys: tuple[str, ...]) -> None:
        """Makes the state, in the parameter's placement, and gives the optimizer its local part."""
        for name in names:
            parameter = self.parameters[name]
            state = {
                key: torch.zeros((), dtype=torch.float32)
                if key == "step"
                else torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
                for key in keys
            }
            optimizer.state[self._locals[name]] = {key: local_tensor(value) for key, value in state.items()}
            self._state.update({f"{name}.{key}": value for key, value in state.items()})

    def named_state(self) -> dict[str, torch.Tensor]:
        """Every state tensor by `PARAMETER.KEY`, sharing memory with the optimizers."""
        return dict(self._state)

    @property
    def learning_rates(self) -> dict[str, float]:
        """The current learning rate by optimizer."""
        return {name: optimizer.param_groups[0]["lr"] for name, optimizer in self._optimizers.items()}

    @torch.no_grad()
    def step(self, *, lr_factor: float) -> None:
        """Updates all parameters from their gradients at `lr_factor` times the configured rates."""
        for name, local in self._locals.items():
            grad = self.parameters[name].grad
            local.grad = None if grad is None else local_tensor(grad)
        for name, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self._base_lr[name] * lr_factor
            optimizer.step()

    def zero_grad(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self._locals[name].grad = None


def _build_adamw(config: OptimConfig, parameters: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    """Weight decay falls on matrices only: norms are scales, not directions."""
    adamw = config.adamw
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": adamw.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=adamw.lr,
        betas=(adamw.beta1, adamw.beta2),
        eps=adamw.eps,
        fused=True,
    )


def _check_whole_matrices(name: str, parameter: nn.Parameter) -> None:
    local = local_tensor(parameter.data)
    if not isinstance(parameter.data, DTensor) or local.shape[-2:] == parameter.shape[-2:]:
        is_whole = local.ndim == 3 or local.shape == parameter.shape
    else:
        is_whole = False
    if not is_whole:
        raise PlacementError(
            f"{name} {tuple(parameter.shape)} is sharded into {tuple(local.shape)}, and Muon needs whole matrices on "
            "a rank; choose optim.matrices=adamw (or optim.experts=adamw), or one rank per replica"
        )
