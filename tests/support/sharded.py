"""A small model's tensors under any mesh, with values that follow from their names alone.

V 37 vocabulary (divisible by no number of ranks tested), D 6 hidden, E experts, F 4 expert hidden.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh; their product is the number of ranks. All ones: plain tensors."""

    dp_replicate: int = 1
    efsdp: int = 1
    ep: int = 1
    num_experts: int = 8

    @property
    def num_ranks(self) -> int:
        return self.dp_replicate * self.efsdp * self.ep


class Stack(nn.Module):
    """One parameter of the given shape."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape, dtype=dtype))


class Model(nn.Module):
    """Every kind of tensor that a run has: uneven, stacked, tiny, bf16, a buffer."""

    def __init__(self, num_experts: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 6)
        self.experts = Stack(num_experts, 4, 6)
        self.norm = nn.LayerNorm(6, bias=False)
        self.brief = Stack(5, 6, dtype=torch.bfloat16)
        self.register_buffer("router_bias", torch.zeros(num_experts))


def value_of(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The same random values for a name in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


def build(layout: Layout) -> Model:
    """The model on the layout's mesh, filled with `value_of` each name."""
    model = Model(layout.num_experts)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(value_of(name, tensor.shape, tensor.dtype))
    if layout.num_ranks == 1:
        return model
    degrees = (layout.dp_replicate, layout.efsdp, layout.ep)
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("dp_replicate", "efsdp", "ep"))
    shards = mesh["efsdp", "ep"]._flatten("dp_shard")
    dense = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else shards
    per_expert = mesh["dp_replicate", "efsdp"] if layout.dp_replicate > 1 else mesh["efsdp"]
    mine = model.experts.w.detach().chunk(layout.ep)[mesh.get_local_rank("ep")].clone()
    model.experts.w = nn.Parameter(DTensor.from_local(mine, mesh["ep"], [Shard(0)]))
    fully_shard(model.experts, mesh=per_expert)
    fully_shard(model.brief, mesh=dense)  # FSDP takes one dtype per group
    fully_shard(model, mesh=dense)
    return model


def tensors_of(model: Model) -> dict[str, torch.Tensor]:
    """Parameters, buffer, a momentum beside each parameter and a step count, all by name."""
    tensors: dict[str, torch.Tensor] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors[f"optim.{name}.momentum"] = parameter.detach() * 2
    tensors["optim.step"] = torch.tensor(7)
    return tensors


def clear(tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite everything in place, so that only a load can bring the values back."""
    with torch.no_grad():
        for tensor in tensors.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(-1)


def wrong_names(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose whole values are not bit for bit what their names ask for; gathers DTensors."""
    wrong = []
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(whole, _expected(name, whole)):
            wrong.append(name)
    return wrong


def _expected(name: str, like: torch.Tensor) -> torch.Tensor:
    if name == "optim.step":
        return torch.tensor(7)
    plain = name.removeprefix("model.").removeprefix("optim.").removesuffix(".momentum")
    return value_of(plain, like.shape, like.dtype) * (2 if name.endswith(".momentum") else 1)
