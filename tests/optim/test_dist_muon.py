"""Distributed Muon is the single-device Muon, bit for bit, wherever matrices lie and whoever owns them.

Equal bits are asked for because nothing may differ: momentum moves element by element, and the same bf16 products run
on the same bf16 values, of which a batch's size changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.muon import Case, Outcome, reference, take_steps, whole_momenta, whole_weights
from support.ranks import run_ranks

from amalthea.flexshard.layout import Grid, StoredParameter
from amalthea.optim.config import MuonConfig


def experts(count: int = 8, storage: Any = "experts") -> tuple[StoredParameter, ...]:
    return (
        StoredParameter("e.gate", (count, 16, 32), storage),
        StoredParameter("e.up", (count, 16, 32), storage),
        StoredParameter("e.down", (count, 32, 16), storage),
    )


DENSE = (
    StoredParameter("square", (32, 32), "rows"),
    StoredParameter("square too", (32, 32), "rows"),
    StoredParameter("wide", (16, 48), "rows"),
    StoredParameter("tall", (48, 16), "rows"),
    StoredParameter("uneven", (10, 24), "rows"),
    StoredParameter("fewer rows than ranks", (2, 24), "rows"),
    StoredParameter("a row", (1, 8), "rows"),
)
HEADS = (
    StoredParameter("heads on one rank each", (32, 32), "rows", 8),
    StoredParameter("heads that ranks cut", (36, 32), "rows", 12),
    StoredParameter("many heads on a rank", (48, 20), "rows", 4),
)
ALL = (*experts(), *DENSE, *HEADS)
FEW = (*experts(), *DENSE[:5])

MESHES: dict[str, Case] = {
    "1": Case(Grid(1, 1), ALL),
    "fsdp4": Case(Grid(1, 4), ALL),
    "hsdp2x2": Case(Grid(2, 2), ALL),
    "hsdp2x2-repeated": Case(Grid(2, 2), ALL, repeated=True),
    "hsdp4x1": Case(Grid(4, 1), ALL),
    "hsdp2x2-ep2": Case(Grid(2, 2, ep=2), ALL),
    "ep2-fsdp2": Case(Grid(1, 4, ep=2), ALL),
    "ep4": Case(Grid(1, 4, ep=4), ALL),
    "3-ranks": Case(Grid(1, 3), ALL),
    "6-ranks": Case(Grid(1, 6), ALL),
    "6-ranks-ep2": Case(Grid(1, 6, ep=2), ALL),
    "hsdp2x3": Case(Grid(2, 3), ALL),
    "2-experts": Case(Grid(1, 4), (*experts(2, "expert_rows"), *DENSE)),
    "2-experts-ep2": Case(Grid(1, 4, ep=2), (*experts(2, "expert_rows"), *DENSE)),
    "1-expert-hsdp2x2": Case(Grid(2, 2), (*experts(1, "expert_rows"), *DENSE)),
    "2-experts-idle-ranks": Case(Grid(1, 4), (*experts(2), *DENSE)),
}


def run(case: Case) -> list[Outcome]:
    return run_ranks(case.num_ranks, take_steps, case)


def check_equal(case: Case, outcomes: list[Outcome]) -> None:
    """Weights of every replica, and momenta, are the reference's bits; gradients are left alone."""
    weights, momenta = reference(case)
    size = case.grid.num_ranks
    for replica in range(case.grid.num_replicas):
        got = whole_weights(case, outcomes[replica * size : (replica + 1) * size])
        assert [name for name in weights if not torch.equal(got[name], weights[name])] == [], f"replica {replica}"
    kept = whole_momenta(case, outcomes)
    assert [name for name in momenta if not torch.equal(kept[name], momenta[name])] == []
    assert all(outcome.grads_kept for outcome in outcomes)


def steps(case: Case, count: int, **config: Any) -> Case:
    return replace(case, config=MuonConfig(lr=0.02, **config), num_steps=count)


@pytest.mark.parametrize("mesh", MESHES)
def test_three_steps_are_the_reference_bit_for_bit(mesh: str) -> None:
    case = steps(MESHES[mesh], 3)
    outcomes = run(case)
    check_equal(case, outcomes)
    assert [outcome.bytes_sent for outcome in outcomes] == [outcome.bytes_announced for outcome in outcomes]


OPTIONS: dict[str, dict[str, Any]] = {
    "no nesterov": {"nesterov": False},
    "bf16 momentum": {"momentum_dtype": "bf16"},
    "bf16 momentum, no nesterov": {"momentum_dtype": "bf16", "nesterov": False},
    "original scale": {"adjust_lr": "original"},
    "no decay": {"weight_decay": 0.0},
    "gram": {"form": "gram"},
    "polar_express": {"coefficients": "polar_express"},
    "polar_express, gram, 7 steps": {"coefficients": "polar_express", "form": "gram", "num_steps": 7},
    "youj": {"coefficients": "youj"},
    "youj, gram": {"coefficients": "youj", "form": "gram"},
    "fp32 products": {"products": "fp32"},
    "fp32 products, gram, 6 steps": {"products": "fp32", "form": "gram", "num_steps": 6},
}


@pytest.mark.parametrize("mesh", ["hsdp2x2", "ep2-fsdp2"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_the_reference_bit_for_bit(option: str, mesh: str) -> None:
    case = steps(MESHES[mesh], 2, **OPTIONS[option])
    check_equal(case, run(case))


def test_options_change_the_update() -> None:
    """So that the test above compares that many things and not one."""
    made = [reference(steps(Case(Grid(1, 1), FEW), 2, **option))[0] for option in ({}, *OPTIONS.values())]
    for first in range(len(made)):
        for second in range(first):
            assert any(not torch.equal(made[first][name], made[second][name]) for name in made[first])
