"""Context parallelism: ranks that share sequences compute what one rank computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import Curve, microbatches, run_steps, tiny_batch, tiny_config

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.tensors import local_tensor
from amalthea.core.world import World
from amalthea.kernels.attention import Documents
from amalthea.train.build import build
from amalthea.train.step import positions, train_step

# One key head to two query heads of eight, so that the heads of four ranks share none.
HEADS = {"model__num_heads": 8, "model__num_kv_heads": 4, "model__head_dim": 4}
LOSSES = {"model__moe__aux_loss_coef": 0.01, "model__moe__z_loss_coef": 0.001}

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {"parallel__cp": 2}),
    "cp4": (4, {"parallel__cp": 4}),
    "cp2-fsdp2": (4, {"parallel__cp": 2}),
    "cp2-ep2": (2, {"parallel__cp": 2, "parallel__ep": 2}),
    "cp2-ep4": (4, {"parallel__cp": 2, "parallel__ep": 4}),
    "cp2-hsdp": (4, {"parallel__cp": 2, "parallel__dp_replicate": 2}),
    "cp4-recompute": (4, {"parallel__cp": 4, "memory__recompute": "block", "memory__offload": True}),
    "cp2-two-passes": (2, {"parallel__cp": 2, "train__microbatch_sequences": 2, "memory__sequences_per_gather": 2}),
}

STEPS = 8


def config(**overrides: Any) -> RunConfig:
    muon = {"optim__matrices": "muon", "optim__experts": "muon"}
    return tiny_config(**{**HEADS, **LOSSES, **muon, **overrides})


@cache
def single() -> Curve:
    return run_ranks(1, run_steps, config(), STEPS)[0]


def test_documents_cross_the_cuts() -> None:
    """Else the tests below would show less than they say."""
    ends = [first for first, _ in tiny_batch(0, range(8)).document_lengths]
    # The first document of some sequences crosses the middle, and the second one of others.
    assert any(end > 16 for end in ends)
    assert any(end < 16 for end in ends)


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_agree_with_one_rank(mesh: str) -> None:
    ranks, overrides = MESHES[mesh]
    one = single()
    several: Curve = run_ranks(ranks, run_steps, config(**overrides), STEPS)[0]
    assert several.losses[0] == pytest.approx(one.losses[0], abs=1e-6)
    assert several.losses == pytest.approx(one.losses, abs=1e-4)
    assert several.grad_norms == pytest.approx(one.grad_norms, rel=1e-3)
    assert several.counts[0] == one.counts[0]


def gradients(world: World, config: RunConfig) -> dict[str, torch.Tensor]:
    """Whole gradients of one batch."""
    run = build(config, resolve(config, world_size=world.size), world)
    (batch,) = microbatches(run, 0)
    documents = Documents(batch.document_lengths, batch.tokens.shape[1])
    output = run.model(positions(run, batch.tokens), documents, positions(run, batch.labels), False)
    (output.result + output.router_losses.sum()).backward()
    found = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found.items()}


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_gradient_is_that_of_one_rank(ranks: int, kv_heads: int) -> None:
    """Also where ranks outnumber key heads, which are then repeated."""
    chosen = config(model__num_kv_heads=kv_heads, parallel__cp=ranks)
    one = run_ranks(1, gradients, config(model__num_kv_heads=kv_heads))[0]
    several = run_ranks(ranks, gradients, chosen)[0]
    assert one.keys() == several.keys()
    for name, expected in one.items():
        torch.testing.assert_close(several[name], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def clipped(world: World, config: RunConfig) -> tuple[float | None, int | None]:
    run = build(config, resolve(config, world_size=world.size), world)
    result = train_step(run, microbatches(run, 0), lr_factor=1.0, tallies=())
    weight = dict(run.model.named_parameters())["blocks.0.attn.wq.weight"]
    assert bool(local_tensor(weight.data).isfinite().all())
    return result.max_attention_logit, result.clipped_heads


def test_qk_clip_sees_the_heads_of_all_ranks() -> None:
    one = run_ranks(1, clipped, config(optim__qk_clip=0.05, model__qk_norm=False))[0]
    four = run_ranks(4, clipped, config(optim__qk_clip=0.05, model__qk_norm=False, parallel__cp=4))[0]
    assert four[0] == pytest.approx(one[0], rel=1e-5)
    assert four[1] == one[1] != 0


@pytest.mark.case(10)
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            {"parallel__cp": 3},
            "parallel.cp is 3, which does not divide the 4 ranks of a replica; valid: 1, 2, 4",
        ),
        (
            {"parallel__cp": 4, "model__num_heads": 6, "model__num_kv_heads": 2},
            "parallel.cp is 4, but must divide model.num_heads 6, and divide model.num_kv_heads 2 or be a multiple of "
            "it; valid: 1, 2, 6",
        ),
        (
            {"parallel__cp": 4, "data__seq_len": 30, "train__global_batch_tokens": 30},
            "parallel.cp is 4, but must divide data.seq_len 30; valid: 1, 2, 3, 5, 6, 10, 15, 30",
        ),
        (
            {"parallel__cp": 2, "parallel__ep": 3},
            "parallel.ep is 3, but must divide both parallel.dp_shard 2 · parallel.cp 2 and model.moe.num_experts 8; "
            "valid: 1, 2, 4",
        ),
    ],
)
def test_a_degree_that_does_not_fit(overrides: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(config(**overrides), world_size=4)
    assert line in error.value.problems
