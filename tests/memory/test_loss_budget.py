"""A budget for logits bounds the vocabulary loss, at any vocabulary, and changes no value."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.tiny import run_steps, tiny_config
from torch._subclasses import FakeTensorMode

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.units import GIB
from amalthea.core.world import World
from amalthea.kernels.vocab_loss import chunk_tokens, vocab_loss_sum
from amalthea.memory.tracker import StorageTracker
from amalthea.train.build import build

VOCAB, TOKENS, HIDDEN = 262_144, 65_536, 64


def test_the_chunk_is_the_largest_that_fits() -> None:
    assert chunk_tokens(budget_gib=1.0, vocab_size=VOCAB, dtype=torch.float32) == 1024
    assert chunk_tokens(budget_gib=1.0, vocab_size=VOCAB, dtype=torch.bfloat16) == 682
    with pytest.raises(ConfigError, match=r"loss_budget_gib is 0\.0005, .* one token over 262144 .* set it to 0\.25"):
        chunk_tokens(budget_gib=0.0005, vocab_size=VOCAB, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_sequence_over_a_large_vocabulary_stays_within_the_budget(dtype: torch.dtype) -> None:
    """Sizes only: whole logits would take 64 GiB."""
    budget_gib = 8.0
    with FakeTensorMode(), StorageTracker() as tracker:
        hidden = torch.empty(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
        weight = torch.empty(VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
        labels = torch.zeros(TOKENS, dtype=torch.int64)
        before = tracker.live_bytes
        chunk = chunk_tokens(budget_gib=budget_gib, vocab_size=VOCAB, dtype=dtype)
        vocab_loss_sum(hidden, weight, labels, chunk_tokens=chunk).backward()
        taken = tracker.peak_bytes - before
    # The two gradients, and below fp32 one product for the weight's, are not a matter of the chunk; its hidden states
    # are, and are narrow beside its logits.
    gradients = VOCAB * HIDDEN * (4 if dtype == torch.float32 else 4 + 2) + TOKENS * HIDDEN * dtype.itemsize
    assert 0.98 * budget_gib * GIB + gradients < taken < budget_gib * GIB + gradients + chunk * (HIDDEN + 16) * 4


def test_values_are_those_of_an_unchunked_float64_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(48, 8, generator=generator, requires_grad=True)
    weight = torch.randn(500, 8, generator=generator, requires_grad=True)
    labels = torch.randint(500, (48,), generator=generator)
    labels[::7] = -100
    chunk = chunk_tokens(budget_gib=500 * 4 * 5.5 / GIB, vocab_size=500, dtype=torch.float32)
    assert chunk == 5
    loss = vocab_loss_sum(hidden, weight, labels, chunk_tokens=chunk)
    found = torch.autograd.grad(loss, (hidden, weight))
    double_hidden, double_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    expected_loss = F.cross_entropy(double_hidden @ double_weight.T, labels, reduction="sum")
    expected = torch.autograd.grad(expected_loss, (double_hidden, double_weight))
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def chunk_of_run(world: World, config: RunConfig) -> int:
    return build(config, resolve(config, world_size=world.size), world).model.head.chunk_tokens


def test_the_setting_reaches_the_head() -> None:
    config = tiny_config(memory__loss_budget_gib=96 * 4 * 7 / GIB)
    assert run_ranks(1, chunk_of_run, config) == [7]
    assert run_ranks(1, chunk_of_run, tiny_config()) == [24]
    few, many = (run_ranks(1, run_steps, c, 2)[0] for c in (config, tiny_config()))
    assert few.losses == pytest.approx(many.losses, rel=1e-6)
