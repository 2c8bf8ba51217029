"""A run is the same run on every mesh: losses, gradient norms, experts' counts and weights."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import Curve, run_steps, tiny_config, whole_state

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.world import World
from amalthea.train.build import build

MESHES = {
    "fsdp": {},
    "hsdp": {"parallel__dp_replicate": 2},
    "ep2-fsdp2": {"parallel__ep": 2},
    "ep4": {"parallel__ep": 4},
    "ep4-by-node": {"parallel__ep": 4, "parallel__ranks_per_node": 2, "parallel__dispatch": "hierarchical"},
    "hsdp-ep2": {"parallel__dp_replicate": 2, "parallel__ep": 2},
    "hsdp-repeated": {"parallel__dp_replicate": 2, "optim__replicas": "repeated"},
}

_single: dict[str, Curve] = {}


def single(config: RunConfig, num_steps: int) -> Curve:
    """The same run on one rank, made once per configuration."""
    key = f"{config.model_dump_json()}/{num_steps}"
    if key not in _single:
        _single[key] = run_ranks(1, run_steps, config, num_steps)[0]
    return _single[key]


def initial_state(world: World, config: RunConfig) -> dict[str, torch.Tensor]:
    return whole_state(build(config, resolve(config, world_size=world.size), world))


@pytest.mark.parametrize("mesh", MESHES)
def test_initial_weights_are_the_same_bits_on_every_mesh(mesh: str) -> None:
    one = run_ranks(1, initial_state, tiny_config())[0]
    four = run_ranks(4, initial_state, tiny_config(**MESHES[mesh]))[0]
    assert one.keys() == four.keys()
    assert [name for name in one if not torch.equal(one[name], four[name])] == []


@pytest.mark.case(15)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_twenty_steps_agree_with_one_rank(mesh: str, optimizer: str) -> None:
    chosen = {"optim__experts": optimizer, "optim__matrices": optimizer}
    one = single(tiny_config(**chosen), 20)
    four = run_ranks(4, run_steps, tiny_config(**chosen, **MESHES[mesh]), 20)[0]
    assert four.losses[0] == pytest.approx(one.losses[0], abs=1e-6)
    assert four.losses == pytest.approx(one.losses, abs=1e-4)
    assert four.grad_norms == pytest.approx(one.grad_norms, rel=1e-3)
    assert one.losses[-1] != pytest.approx(one.losses[0], abs=1e-3), "the run must have learned something"
