"""QK-clip bounds attention logits, head by head, on any mesh."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import microbatches, tiny_batch, tiny_config, whole_state

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.world import World
from amalthea.kernels.attention import Documents
from amalthea.kernels.max_logits import max_logits
from amalthea.train.build import Run, build
from amalthea.train.step import forward, train_step

THRESHOLD = 5.0


def config(*, clip: bool, lr: float = 0.05, **overrides: object) -> RunConfig:
    """A run whose learning rate drives queries and keys apart from all bounds."""
    return tiny_config(
        model__qk_norm=False,
        optim__qk_clip=THRESHOLD if clip else None,
        optim__matrices="muon",
        optim__muon={"lr": lr, "weight_decay": 0.0},
        **overrides,
    )


def plain_max_logits(query: torch.Tensor, key: torch.Tensor, lengths: list[list[int]]) -> torch.Tensor:
    """Twin: whole scores in float64, documents and the future masked out."""
    _, seq_len, heads, head_dim = query.shape
    key = key.repeat_interleave(heads // key.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query.double(), key.double()) / head_dim**0.5
    for row, row_lengths in enumerate(lengths):
        document = torch.repeat_interleave(torch.tensor(row_lengths))
        seen = (document[:, None] == document[None, :]) & torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
        scores[row].masked_fill_(~seen, float("-inf"))
    return scores.amax(dim=(0, 2, 3))


@pytest.mark.parametrize("chunk_elements", [1, 50, 1 << 20])
def test_largest_logit_of_each_head(chunk_elements: int) -> None:
    query, key = torch.randn(2, 12, 4, 8), torch.randn(2, 12, 2, 8)
    lengths = [[5, 7], [12]]
    found = max_logits(query, key, documents=Documents.of(lengths, 12), chunk_elements=chunk_elements)
    torch.testing.assert_close(found.double(), plain_max_logits(query, key, lengths), rtol=1e-6, atol=1e-6)


def logits_of(run: Run, step: int) -> torch.Tensor:
    """Largest logits [L, H] on one whole batch, the same on every rank."""
    with torch.no_grad():
        return forward(run, tiny_batch(step, range(8))).max_logits


def steps(world: World, run_config: RunConfig, count: int) -> tuple[list[float], list[int], dict[str, torch.Tensor]]:
    run = build(run_config, resolve(run_config, world_size=world.size), world)
    largest, clipped = [], []
    for step in range(count):
        result = train_step(run, microbatches(run, step), lr_factor=1.0, tallies=())
        largest.append(result.max_attention_logit or 0.0)
        clipped.append(result.clipped_heads or 0)
    return largest, clipped, whole_state(run)


def clip_once(world: World, run_config: RunConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logits before and after one step that changes nothing but the clip."""
    run = build(run_config, resolve(run_config, world_size=world.size), world)
    with torch.no_grad():
        for block in run.model.blocks:
            block.attn.wq.weight.mul_(30.0)
    before = logits_of(run, 0)
    train_step(run, [tiny_batch(0, range(8))], lr_factor=0.0, tallies=())
    return before, logits_of(run, 0)


def test_every_head_shrinks_to_the_bound_and_no_other_moves() -> None:
    before, after = run_ranks(1, clip_once, config(clip=True))[0]
    assert bool((before > THRESHOLD).any())
    # The first layer's input is the same in both passes; deeper ones see what the first layer now attends to.
    torch.testing.assert_close(after[0], before[0].clamp(max=THRESHOLD), rtol=1e-4, atol=1e-4)


def test_a_run_that_diverges_without_it_stays_bounded() -> None:
    tracked = config(clip=True, lr=0.3)
    unbounded = tracked.model_copy(update={"optim": tracked.optim.model_copy(update={"qk_clip": 1e9})})
    free, _, _ = run_ranks(1, steps, unbounded, 40)[0]
    held, clipped, _ = run_ranks(1, steps, tracked, 40)[0]
    assert free[-1] > 50 * THRESHOLD, "without the clip logits must grow out of bounds"
    # Logits are seen on the next batch and after another large update, so they may pass the bound by so much.
    assert max(held) < 3 * THRESHOLD
    assert sum(clipped) > 0


@pytest.mark.parametrize("mesh", [{}, {"parallel__dp_replicate": 2}, {"parallel__ep": 2}])
def test_clipping_is_the_same_on_every_mesh(mesh: dict[str, int]) -> None:
    one = run_ranks(1, steps, config(clip=True), 4)[0]
    four = run_ranks(4, steps, config(clip=True, **mesh), 4)
    assert four[0][1] == one[1]
    assert four[0][0] == pytest.approx(one[0], rel=2e-2)
    for rank in four[1:]:
        assert [n for n in rank[2] if not torch.equal(rank[2][n], four[0][2][n])] == []


def test_refused_where_norms_bound_logits_already() -> None:
    with pytest.raises(ConfigError, match=r"qk_clip.*model\.qk_norm=false"):
        resolve(tiny_config(optim__qk_clip=10.0), world_size=1)
