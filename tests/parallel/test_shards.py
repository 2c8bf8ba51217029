"""`local_part` says which part of a parameter a rank holds, on even and uneven meshes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import tiny_config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import PlacementError
from amalthea.core.world import World
from amalthea.model.transformer import Transformer
from amalthea.parallel.shards import local_part
from amalthea.train.build import build

THREE: dict[str, Any] = {"train__global_batch_tokens": 32 * 6}
UNEVEN: dict[str, Any] = {"model__vocab_size": 97, "data__tokenizer__vocab_size": 97}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp, vocabulary 97": (4, UNEVEN),
    "ep2-efsdp2": (4, {"parallel__ep": 2}),
    "ep2-efsdp2, 6 experts": (4, {"parallel__ep": 2, "model__moe__num_experts": 6}),
    "ep4": (4, {"parallel__ep": 4}),
    "hsdp-ep2, vocabulary 97": (4, {"parallel__dp_replicate": 2, "parallel__ep": 2, **UNEVEN}),
    "efsdp3, 8 experts": (3, THREE),
    "efsdp3, 4 experts": (3, THREE | {"model__moe__num_experts": 4}),
    "efsdp4, 2 experts, cut inside": (4, {"model__moe__num_experts": 2}),
    "ep2-efsdp2, 2 experts, cut inside": (4, {"model__moe__num_experts": 2, "parallel__ep": 2}),
    "efsdp3, 2 experts, whole": (3, THREE | {"model__moe__num_experts": 2}),
    "efsdp4, heads of 2": (4, {"model__head_dim": 2}),
    "one rank": (1, {}),
}


def place(world: World, config: RunConfig) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Writes each element's number where `local_part` says it lies and checks the whole; returns offsets and sizes."""
    run = build(config, resolve(config, world_size=world.size), world)
    parts = {}
    for name, parameter in run.model.named_parameters():
        local, offsets = local_part(name, parameter)
        numbers = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
        mine = numbers
        for dim, (offset, size) in enumerate(zip(offsets, local.shape, strict=True)):
            mine = mine.narrow(dim, offset, size)
        local.copy_(mine)
        data = parameter.data
        whole = data.full_tensor() if isinstance(data, DTensor) else data
        assert torch.equal(whole, numbers), name
        parts[name] = (offsets, tuple(local.shape))
    return parts


@pytest.mark.case(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_parts_are_the_parts_of_the_whole(layout: str) -> None:
    num_ranks, changes = LAYOUTS[layout]
    config = tiny_config(model__num_layers=1, **changes)
    reports = run_ranks(num_ranks, place, config)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(config.model).named_parameters()}
    for name, shape in shapes.items():
        held = sum(math.prod(report[name][1]) for report in reports)
        assert held == shape.numel() * config.parallel.dp_replicate, name
    sizes = {name: [report[name][1] for report in reports] for name in reports[0]}
    stack = "blocks.0.moe.experts.w_up"
    expected = {
        "fsdp, vocabulary 97": ("embed.weight", [(25, 32), (25, 32), (25, 32), (22, 32)]),
        "ep2-efsdp2": (stack, [(2, 16, 32)] * 4),
        "ep2-efsdp2, 6 experts": (stack, [(2, 16, 32), (2, 16, 32), (1, 16, 32), (1, 16, 32)]),
        "ep4": (stack, [(2, 16, 32)] * 4),
        "hsdp-ep2, vocabulary 97": ("head.weight", [(49, 32), (48, 32)] * 2),
        "efsdp3, 8 experts": (stack, [(3, 16, 32), (3, 16, 32), (2, 16, 32)]),
        "efsdp3, 4 experts": (stack, [(2, 16, 32), (2, 16, 32), (0, 16, 32)]),
        "efsdp4, 2 experts, cut inside": (stack, [(2, 4, 32)] * 4),
        "ep2-efsdp2, 2 experts, cut inside": (stack, [(1, 8, 32)] * 4),
        "efsdp3, 2 experts, whole": (stack, [(1, 16, 32), (1, 16, 32), (0, 16, 32)]),
        "efsdp4, heads of 2": ("blocks.0.attn.q_norm.weight", [(1,), (1,), (0,), (0,)]),
        "one rank": ("embed.weight", [(96, 32)]),
    }
    name, shapes_by_rank = expected[layout]
    assert sizes[name] == shapes_by_rank


def refuse_partial(world: World) -> str:
    mesh = init_device_mesh("cpu", (world.size,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()]))
    with pytest.raises(PlacementError) as caught:
        local_part("blocks.0.attn.wq.weight", parameter)
    return str(caught.value)


def test_a_parameter_of_which_ranks_hold_summands_is_refused_by_name() -> None:
    for message in run_ranks(2, refuse_partial):
        assert "blocks.0.attn.wq.weight is placed as" in message
        assert "shards and replicas were expected" in message
