"""`local_rows` says which rows of a parameter a rank holds, on even and uneven meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import tiny_config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import PlacementError
from amalthea.core.world import World
from amalthea.parallel.shards import local_rows
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
    "efsdp4, heads of 2": (4, {"model__head_dim": 2}),
    "one rank": (1, {}),
}


def place(world: World, config: RunConfig) -> dict[str, tuple[int, int, int]]:
    """Writes each row's number where `local_rows` says it lies and checks the whole; returns the ranges."""
    run = build(config, resolve(config, world_size=world.size), world)
    ranges = {}
    for name, parameter in run.model.named_parameters():
        local, first, rows = local_rows(name, parameter)
        numbers = torch.arange(rows, dtype=torch.float32).view(-1, *[1] * (local.ndim - 1))
        local.copy_(numbers[first : first + local.shape[0]].expand_as(local))
        data = parameter.data
        whole = data.full_tensor() if isinstance(data, DTensor) else data
        assert torch.equal(whole, numbers.expand_as(whole)), name
        ranges[name] = (first, local.shape[0], rows)
    return ranges


@pytest.mark.case(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_rows_are_the_rows_of_the_whole(layout: str) -> None:
    num_ranks, changes = LAYOUTS[layout]
    config = tiny_config(**changes)
    reports = run_ranks(num_ranks, place, config)
    for name, (_, _, rows) in reports[0].items():
        held = sorted((first, count) for first, count, _ in (report[name] for report in reports) if count)
        assert sum(count for _, count in held) == rows * config.parallel.dp_replicate, name
    sizes = {name: [report[name][1] for report in reports] for name in reports[0]}
    expected = {
        "fsdp, vocabulary 97": ("embed.weight", [25, 25, 25, 22]),
        "ep2-efsdp2": ("blocks.0.moe.experts.w_up", [2, 2, 2, 2]),
        "ep2-efsdp2, 6 experts": ("blocks.0.moe.experts.w_up", [2, 2, 1, 1]),
        "ep4": ("blocks.0.moe.experts.w_up", [2, 2, 2, 2]),
        "hsdp-ep2, vocabulary 97": ("head.weight", [49, 48, 49, 48]),
        "efsdp3, 8 experts": ("blocks.0.moe.experts.w_up", [3, 3, 2]),
        "efsdp3, 4 experts": ("blocks.0.moe.experts.w_up", [2, 2, 0]),
        "efsdp4, heads of 2": ("blocks.0.attn.q_norm.weight", [1, 1, 0, 0]),
        "one rank": ("embed.weight", [96]),
    }
    name, counts = expected[layout]
    assert sizes[name] == counts


def refuse_columns(world: World) -> str:
    mesh = init_device_mesh("cpu", (world.size,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]))
    with pytest.raises(PlacementError) as caught:
        local_rows("blocks.0.attn.wq.weight", parameter)
    return str(caught.value)


def test_a_parameter_cut_by_columns_is_refused_by_name() -> None:
    for message in run_ranks(2, refuse_columns):
        assert "blocks.0.attn.wq.weight is placed as" in message
        assert "rows (Shard(0)) were expected" in message
