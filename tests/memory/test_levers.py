"""Every memory lever leaves the run as it was: the same losses, norms, counts and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import Curve, run_steps, tiny_config

STEPS = 2
LAYERS = 6

LEVERS: dict[str, dict[str, Any]] = {
    "recompute": {"memory__recompute": "block"},
    "groups of 2": {"memory__blocks_per_group": 2},
    "recompute every 2": {"memory__recompute": "block", "memory__blocks_per_group": 2},
    "recompute every 3": {"memory__recompute": "block", "memory__blocks_per_group": 3},
    "offload": {"memory__recompute": "block", "memory__offload": True},
    "offload every 2": {"memory__recompute": "block", "memory__offload": True, "memory__blocks_per_group": 2},
    "offload what 2 slots hold": {
        "memory__recompute": "block",
        "memory__offload": True,
        "memory__offload_budget_gib": 2.1 * 32 * 32 * 4 / 2**30,
    },
    "selective": {"memory__recompute": "selective"},
    "selective every 2, offload": {
        "memory__recompute": "selective",
        "memory__keep": ("attention", "experts", "all_to_all"),
        "memory__blocks_per_group": 2,
        "memory__offload": True,
    },
    "unshard_async_op": {"memory__unshard_async_op": True},
    "all": {
        "memory__recompute": "block",
        "memory__offload": True,
        "memory__blocks_per_group": 2,
        "memory__unshard_async_op": True,
    },
    "recompute every 4, the last group short": {"memory__recompute": "block", "memory__blocks_per_group": 4},
}
BREADTH: dict[str, dict[str, Any]] = {
    "2 passes a gather": {"memory__sequences_per_gather": 2},
    "2 passes, recompute": {"memory__sequences_per_gather": 2, "memory__recompute": "block"},
    "2 passes, offload": {
        "memory__sequences_per_gather": 2,
        "memory__recompute": "block",
        "memory__offload": True,
    },
    "2 passes, selective": {"memory__sequences_per_gather": 2, "memory__recompute": "selective"},
    "2 passes, recompute every 2": {
        "memory__sequences_per_gather": 2,
        "memory__recompute": "block",
        "memory__blocks_per_group": 2,
    },
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "4 ranks": (4, {}),
    "ep2-fsdp2": (4, {"parallel__ep": 2}),
    "hsdp-ep2": (4, {"parallel__dp_replicate": 2, "parallel__ep": 2}),
}
BY_NODE = {"parallel__ep": 4, "parallel__dispatch": "hierarchical", "parallel__ranks_per_node": 2}

EVERYWHERE = ("recompute every 2", "selective every 2, offload", "all")
CASES = [(lever, mesh) for lever in LEVERS for mesh in (MESHES if lever in EVERYWHERE else ("1 rank", "ep2-fsdp2"))]


def curve(mesh: str, **overrides: Any) -> Curve:
    num_ranks, parallel = (4, BY_NODE) if mesh == "by node" else MESHES[mesh]
    config = tiny_config(model__num_layers=LAYERS, train__microbatch_sequences=1, **parallel, **overrides)
    return run_ranks(num_ranks, run_steps, config, STEPS)[0]


@pytest.fixture(scope="module")
def plain() -> dict[str, Curve]:
    return {mesh: curve(mesh) for mesh in MESHES}


@pytest.mark.parametrize(("lever", "mesh"), CASES)
def test_bit_for_bit(plain: dict[str, Curve], lever: str, mesh: str) -> None:
    found, expected = curve(mesh, **LEVERS[lever]), plain[mesh]
    assert found.losses == expected.losses
    assert found.counts == expected.counts
    assert [n for n in expected.parameters if not torch.equal(found.parameters[n], expected.parameters[n])] == []


@pytest.mark.parametrize("mesh", ["1 rank", "hsdp-ep2"])
@pytest.mark.parametrize("lever", BREADTH)
def test_breadth_first(plain: dict[str, Curve], mesh: str, lever: str) -> None:
    found, expected = curve(mesh, **BREADTH[lever]), plain[mesh]
    assert found.losses == pytest.approx(expected.losses, abs=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
    assert found.counts == expected.counts
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", ["1 rank", "2 ranks"])
def test_four_passes_under_one_gather(plain: dict[str, Curve], mesh: str) -> None:
    found = curve(mesh, memory__sequences_per_gather=4, memory__recompute="block", memory__offload=True)
    expected = plain[mesh]
    assert found.losses == pytest.approx(expected.losses, abs=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
    assert found.counts == expected.counts
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory", [{}, {"memory__recompute": "block"}, {"memory__recompute": "selective"}], ids=str)
@pytest.mark.parametrize("mesh", ["ep2-fsdp2", "by node"])
def test_chunks_that_take_turns(mesh: str, memory: dict[str, Any]) -> None:
    found = curve(mesh, parallel__dispatch_chunks=3, model__moe__num_shared_experts=1, **memory)
    expected = curve(mesh, model__moe__num_shared_experts=1)
    assert found.losses == pytest.approx(expected.losses, abs=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
    assert found.counts == expected.counts
    for name, value in expected.parameters.items():
        # Sums in another order; where a gradient is about zero, AdamW's first steps make a difference of it.
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-5, atol=1e-5)
