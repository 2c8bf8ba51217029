"""The shipped shapes have the sizes that they claim, and fit the machines that they are for."""

from __future__ import annotations

import pytest

from amalthea.config.check import resolve
from amalthea.core.errors import ConfigError
from amalthea.model.config import ModelConfig
from amalthea.recipes.registry import load_recipe


def counts(model: ModelConfig) -> tuple[int, int]:
    """Total and active parameters, written out once more, apart from the accounting."""
    D, F, E, K, L = (
        model.hidden_size,
        model.moe.expert_hidden_size,
        model.moe.num_experts,
        model.moe.top_k,
        model.num_layers,
    )
    attention = 2 * D * model.num_heads * model.head_dim + 2 * D * model.num_kv_heads * model.head_dim
    norms = 2 * D + 2 * model.head_dim
    around = attention + norms + E * D + 3 * D * F * model.moe.num_shared_experts
    ends = 2 * model.vocab_size * D + D
    return ends + L * (around + E * 3 * D * F), ends + L * (around + K * 3 * D * F)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("quickstart", 8_566_720, 4_437_952),
        ("moe-small", 6_981_490_688, 1_143_019_520),
        ("europa-1t", 951_874_634_240, 32_843_907_584),
    ],
)
def test_parameters(name: str, total: int, active: int) -> None:
    assert counts(load_recipe(name).model) == (total, active)


def test_moe_small_is_seven_billion_with_one_active() -> None:
    config = load_recipe("moe-small")
    total, active = counts(config.model)
    embedding = config.model.vocab_size * config.model.hidden_size
    assert total == pytest.approx(7.0e9, rel=0.01)
    assert active - embedding == pytest.approx(1.0e9, rel=0.01)


def test_europa_has_the_published_shape() -> None:
    model = load_recipe("europa-1t").model
    assert (model.num_layers, model.hidden_size, model.moe.num_experts, model.moe.top_k) == (74, 6144, 384, 8)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (48, 16, 128)
    assert (model.moe.expert_hidden_size, model.moe.num_shared_experts) == (1792, 1)
    assert (model.vocab_size, model.tie_embeddings, model.max_seq_len) == (262_144, False, 65_536)
    total, active = counts(model)
    assert round(total / 1e9, 1) == 951.9
    assert round(active / 1e9, 1) == 32.8


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_quickstart_runs_on_one_two_and_four_ranks(ranks: int) -> None:
    assert resolve(load_recipe("quickstart"), world_size=ranks).dp_shard == ranks


def test_moe_small_fits_eight_ranks_with_whole_experts() -> None:
    run = resolve(load_recipe("moe-small"), world_size=8)
    assert (run.ep, run.efsdp, run.accumulation_steps) == (8, 1, 8)


def test_europa_fits_four_replicas_of_384() -> None:
    run = resolve(load_recipe("europa-1t"), world_size=1536)
    assert (run.dp_replicate, run.dp_shard, run.ep, run.efsdp) == (4, 384, 4, 96)
    assert (run.sequences_per_rank, run.accumulation_steps) == (1, 1)


def test_europa_refuses_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"parallel.dp_replicate is 4, which does not divide the 6 ranks"):
        resolve(load_recipe("europa-1t"), world_size=6)
