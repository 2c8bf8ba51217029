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
    """Parameters with gradients, split over the mesh by their first dim, and what both were at first."""

    parameters: dict[str, nn.Parameter]
    weights: dict[str, DTensor]
    gradients: dict[str, DTensor]

    def restore_gradients(self) -> None:
        """Some peers use `.grad` as scratch, so every side gets it anew before each step."""
        for name, parameter in self.parameters.items():
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.to_local().copy_(self.gradients[name].to_local())

    def updates(self, *, lr: float, weight_decay: float) -> Iterator[tuple[str, torch.Tensor]]:
        """What a first step added to each whole tensor beside weight decay. Communication: one all-gather each."""
        for name, parameter in self.parameters.items():
            yield name, (parameter.detach() - self.weights[name] * (1 - lr * weight_decay)).full_tensor()


class Source:
    """Makes sides' tensors from one set of weights and gradients; draws each once."""

    def __init__(self, workload: Workload, mesh: DeviceMesh) -> None:
        self.workload, self.mesh = workload, mesh
        self._drawn: dict[str, tuple[DTensor, DTensor]] = {}

    def make(self, part: Part, *, cut_stacks: bool = False) -> Tensors:
        """`cut_stacks` makes each expert's matrix a parameter `NAME[expert]` of its own, split by rows."""
        tensors = Tensors({}, {}, {})
        for name, shape in self.workload.shapes(part).items():
            keys = [f"{name}[{expert}]" for expert in range(shape[0])] if cut_stacks and len(shape) == 3 else [name]
            for key in keys:
                if key not in self._drawn:
                    self._draw(name, keys)
                tensors.weights[key], tensors.gradients[key] = self._drawn[key]
                parameter = tensors.parameters[key] = nn.Parameter(tensors.weights[key].clone())
                parameter.grad = tensors.gradients[key].clone()
        return tensors

    def _draw(self, name: str, keys: list[str]) -> None:
        whole = [self.workload.draw(name, purpose=purpose) for purpose in ("weight", "gradient")]
        pairs = [tuple(whole)] if keys == [name] else list(zip(*whole, strict=True))
        for key, pair in zip(keys, pairs, strict=True):
            weight, gradient = (distribute_tensor(t, self.mesh, [Shard(0)], src_data_rank=None) for t in pair)
            self._drawn[key] = weight, gradient


def polar(matrix: torch.Tensor) -> torch.Tensor:
    """U·Vᵀ in float64, as (G·Gᵀ)^(-1/2)·G by the eigenvalues of the smaller Gram matrix.

    Right to about nine digits for Gaussian matrices, and many times faster than the singular value decomposition.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return polar(matrix.mT).mT
    g = matrix.double()
    values, vectors = torch.linalg.eigh(g @ g.mT)
    return vectors @ ((vectors.mT @ g) / values.sqrt()[:, None])


class Exact:
    """The exact polar factors U·Vᵀ of all gradients, of which each rank checks every `num_ranks`-th."""

    def __init__(self, workload: Workload, *, rank: int, num_ranks: int) -> None:
        self._factors: dict[tuple[str, int], torch.Tensor] = {}
        matrices = [
            (name, e) for name, shape in workload.shapes("both").items() for e in range(shape[0] if shape[2:] else 1)
        ]
        for name, expert in matrices[rank::num_ranks]:
            gradient = workload.draw(name, purpose="gradient")
            self._factors[name, expert] = polar(gradient[expert] if gradient.ndim == 3 else gradient)

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
