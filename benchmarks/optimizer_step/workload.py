"""The tensors of the benchmark: what each rank holds of them, and how near an update comes to the exact one.

Shape legend: E experts, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Part = Literal["experts", "dense", "both"]


@dataclass(frozen=True)
class Workload:
    """The matrices of a small mixture-of-experts model, named as the model names them.

    The default is the published workload: 8 layers × 16 experts × 3 matrices of 512×160, and 32 matrices of 512×512.
    """

    num_layers: int = 8
    num_experts: int = 16
    hidden: int = 512
    expert_hidden: int = 160

    def shapes(self, part: Part) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        experts, hidden, inner = self.num_experts, self.hidden, self.expert_hidden
        for layer in range(self.num_layers):
            if part != "experts":
                names = [f"blocks.{layer}.attn.{name}.weight" for name in ("wq", "wk", "wv", "wo")]
                shapes |= dict.fromkeys(names, (hidden, hidden))
            if part != "dense":
                prefix = f"blocks.{layer}.moe.experts"
                shapes |= dict.fromkeys((f"{prefix}.w_gate", f"{prefix}.w_up"), (experts, inner, hidden))
                shapes[f"{prefix}.w_down"] = (experts, hidden, inner)
        return shapes

    def draw(self, name: str, *, purpose: Literal["weight", "gradient"]) -> torch.Tensor:
        """The whole tensor, the same on every rank and for every side; standard normal."""
        number = 2 * list(self.shapes("both")).index(name) + (purpose == "gradient")
        generator = torch.Generator().manual_seed(number)
        return torch.randn(self.shapes("both")[name], generator=generator)


@dataclass
class Tensors:
    """Parameters with gradients, split over the mesh by their first dim, and fresh copies of both."""

    parameters: dict[str, nn.Parameter]
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]

    def restore_gradients(self) -> None:
        """Some peers use `.grad` as scratch, so every side gets it anew before each step."""
        for name, parameter in self.parameters.items():
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.to_local().copy_(self.gradients[name])

    def updates(self, *, lr: float, weight_decay: float) -> Iterator[tuple[str, torch.Tensor]]:
        """What a first step added to each whole tensor beside weight decay. Communication: one all-gather each."""
        for name, parameter in self.parameters.items():
            weight = DTensor.from_local(self.weights[name], parameter.device_mesh, [Shard(0)], shape=parameter.shape)
            yield name, (parameter.detach() - weight * (1 - lr * weight_decay)).full_tensor()


def make_tensors(workload: Workload, part: Part, mesh: DeviceMesh, *, cut_stacks: bool = False) -> Tensors:
    """`cut_stacks` makes each expert's matrix a parameter `NAME[expert]` of its own, split by rows."""
    tensors = Tensors({}, {}, {})
    for name in workload.shapes(part):
        weight, gradient = (workload.draw(name, purpose=purpose) for purpose in ("weight", "gradient"))
        pairs = {name: (weight, gradient)}
        if cut_stacks and weight.ndim == 3:
            pairs = {f"{name}[{e}]": pair for e, pair in enumerate(zip(weight, gradient, strict=True))}
        for key, pair in pairs.items():
            local, grad = (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in pair)
            parameter = tensors.parameters[key] = nn.Parameter(local)
            parameter.grad = grad
            tensors.weights[key] = local.to_local().clone()
            tensors.gradients[key] = grad.to_local().clone()
    return tensors


class Exact:
    """The exact polar factors U·Vᵀ of all gradients, of which each rank checks every `num_ranks`-th."""

    def __init__(self, workload: Workload, *, rank: int, num_ranks: int) -> None:
        self._factors: dict[tuple[str, int], torch.Tensor] = {}
        matrices = [
            (name, e) for name, shape in workload.shapes("both").items() for e in range(shape[0] if shape[2:] else 1)
        ]
        for name, expert in matrices[rank::num_ranks]:
            gradient = workload.draw(name, purpose="gradient").double()
            u, _, vh = torch.linalg.svd(gradient[expert] if gradient.ndim == 3 else gradient, full_matrices=False)
            self._factors[name, expert] = u @ vh

    def worst_cosine(self, tensors: Tensors, *, lr: float, weight_decay: float) -> float:
        """The least cosine of a matrix's first update to its exact one, over the matrices that this rank checks.

        From zero momentum, the first direction is the gradient times a positive number, Nesterov or not.
        """
        worst = 1.0
        for name, update in tensors.updates(lr=lr, weight_decay=weight_decay):
            base, _, cut = name.partition("[")
            first = int(cut.rstrip("]")) if cut else 0
            for offset, matrix in enumerate(update if update.ndim == 3 else update[None]):
                if (factor := self._factors.get((base, first + offset))) is not None:
                    cosine = -(matrix.double() * factor).sum() / matrix.double().norm() / factor.norm()
                    worst = min(worst, float(cosine))
        return worst
