"""The planner's boxes are what FSDP and expert parallelism really store, on every mesh."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import SEQ_LEN, tiny_config
from torch.distributed.tensor import DTensor

from amalthea.config.check import resolve
from amalthea.core.world import World
from amalthea.train.build import build

MESHES: dict[str, tuple[int, dict[str, Any], str]] = {
    "fsdp": (4, {}, "experts"),
    "hsdp": (4, {"parallel__dp_replicate": 2}, "experts"),
    "hsdp-repeated": (4, {"parallel__dp_replicate": 2, "optim__replicas": "repeated"}, "experts"),
    "ep2-fsdp2": (4, {"parallel__ep": 2}, "experts"),
    "ep4": (4, {"parallel__ep": 4}, "experts"),
    "hsdp-ep2": (4, {"parallel__dp_replicate": 2, "parallel__ep": 2}, "experts"),
    "3-ranks": (3, {}, "experts"),
    "6-ranks": (6, {}, "experts"),
    "6-ranks-ep2": (6, {"parallel__ep": 2}, "experts"),
    "2-experts": (4, {"model__moe__num_experts": 2}, "expert_rows"),
    "2-experts-ep2": (4, {"model__moe__num_experts": 2, "parallel__ep": 2}, "expert_rows"),
    "4-experts-that-6-ranks-cannot-cut": (6, {"model__moe__num_experts": 4}, "experts"),
}


def wrong_boxes(world: World, overrides: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Fills each local part with the numbers that its box says; names that are then not 0, 1, 2… when gathered."""
    config = tiny_config(
        optim__matrices="muon",
        optim__experts="muon",
        train__global_batch_tokens=24 * SEQ_LEN,
        **overrides,
    )
    run = build(config, resolve(config, world_size=world.size), world)
    muon, place = run.optimizers.muon, run.optimizers.place
    assert muon is not None
    wrong = []
    for stored in muon.layout.parameters:
        parameter = run.optimizers.parameters[stored.name]
        assert isinstance(parameter, DTensor)
        whole = torch.arange(float(parameter.numel())).view(parameter.shape)
        box = stored.box(muon.layout.grid, place.rank)
        part = whole.view(-1, *stored.shape[-2:])[box.expert_start : box.expert_stop, box.row_start : box.row_stop]
        local = parameter.data.to_local()
        if part.numel() != local.numel():
            wrong.append(f"{stored.name} holds {tuple(local.shape)}, not {box}")
            continue
        local.copy_(part.reshape(local.shape))
        if not torch.equal(parameter.full_tensor(), whole):
            wrong.append(stored.name)
    return wrong, [stored.storage for stored in muon.layout.parameters]


@pytest.mark.parametrize("mesh", MESHES)
def test_boxes_are_what_is_stored(mesh: str) -> None:
    num_ranks, overrides, storage = MESHES[mesh]
    for wrong, storages in run_ranks(num_ranks, wrong_boxes, overrides):
        assert wrong == []
        assert Counter(storages) == {storage: 2 * 3, "rows": 2 * (4 + 3)}
