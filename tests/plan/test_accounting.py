"""The accounting against the published figures of the reference model, and against counted tensors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amalthea.core.errors import ConfigError
from amalthea.model.config import ModelConfig, MoEConfig
from amalthea.model.transformer import Transformer
from amalthea.optim.config import OptimConfig
from amalthea.plan.accounting import FP32_BYTES, account
from amalthea.recipes.europa_1t import europa_1t

REFERENCE = europa_1t().model
DOCUMENT = Path(__file__).parents[2] / "docs" / "concepts" / "accounting.md"

PARTS = {
    "embed.": "embedding",
    "head.": "head",
    "attn.w": "attention",
    "moe.router.": "router",
    "moe.experts.": "routed_experts",
    "moe.shared.": "shared_experts",
    "mlp.": "dense_mlp",
    "norm.": "norms",
}


def _meta_model(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def _counted_by_part(model: Transformer) -> dict[str, int]:
    """Elements of the model's parameters by part, read off their names."""
    counts = dict.fromkeys(PARTS.values(), 0)
    for name, parameter in model.named_parameters():
        (part,) = {part for fragment, part in PARTS.items() if fragment in name}
        counts[part] += parameter.numel()
    return counts


@st.composite
def _models(draw: st.DrawFn) -> ModelConfig:
    """Small models of every kind that the family has."""
    num_layers = draw(st.integers(1, 4))
    num_kv_heads = draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 6))
    return ModelConfig(
        vocab_size=draw(st.integers(3, 40)),
        hidden_size=draw(st.integers(2, 24)),
        num_layers=num_layers,
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 5)),
        moe=MoEConfig(
            num_experts=num_experts,
            top_k=draw(st.integers(1, num_experts)),
            expert_hidden_size=draw(st.integers(1, 12)),
            num_shared_experts=draw(st.integers(0, 2)),
        ),
        num_dense_layers=draw(st.integers(0, num_layers)),
        dense_hidden_size=draw(st.integers(1, 20)),
        qk_norm=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        max_seq_len=8,
    )


@settings(max_examples=60, deadline=None)
@given(config=_models())
def test_parts_equal_a_count_over_the_meta_model(config: ModelConfig) -> None:
    accounting, model = account(config, seq_len=8), _meta_model(config)
    assert accounting.to_json()["params_by_part"] == _counted_by_part(model)
    assert accounting.total_params == sum(p.numel() for p in model.parameters())
    bias = sum(b.numel() for name, b in model.named_buffers() if name.endswith("router.bias"))
    assert accounting.state_bytes.load_balance_bias_fp32 == FP32_BYTES * bias


@settings(max_examples=30, deadline=None)
@given(config=_models(), length=st.integers(1, 12))
def test_flops_equal_the_products_that_a_forward_pass_makes(config: ModelConfig, length: int) -> None:
    """Product by product, pair by pair: one token at a time, with loops instead of closed forms."""
    hidden, moe, head = config.hidden_size, config.moe, config.num_heads * config.head_dim
    key_value = config.num_kv_heads * config.head_dim
    linear = 2 * config.vocab_size * hidden
    for layer in range(config.num_layers):
        shapes = [(head, hidden), (key_value, hidden), (key_value, hidden), (hidden, head)]
        if layer < config.num_dense_layers:
            assert config.dense_hidden_size
            shapes += 3 * [(config.dense_hidden_size, hidden)]
        else:
            shapes += [(moe.num_experts, hidden)]
            shapes += 3 * (moe.top_k + moe.num_shared_experts) * [(moe.expert_hidden_size, hidden)]
        linear += sum(2 * rows * columns for rows, columns in shapes)
    pairs = sum(1 for query in range(length) for key in range(length) if key <= query)
    attention = config.num_layers * config.num_heads * pairs * (2 * config.head_dim + 2 * config.head_dim)

    flops = account(config, seq_len=length).flops_per_token
    assert flops.linear_forward.total == linear
    assert flops.full_causal.attention_forward * length == attention


def test_the_reference_model_has_the_published_size() -> None:
    accounting = account(REFERENCE, seq_len=65_536)
    assert accounting.total_params == sum(p.numel() for p in _meta_model(REFERENCE).parameters())
    assert accounting.total_params == pytest.approx(951.875e9, abs=0.0005e9)
    assert accounting.active_params == pytest.approx(32.844e9, abs=0.0005e9)
    assert accounting.active_params_without_embedding == pytest.approx(31.23e9, abs=0.005e9)
    in_gib = accounting.total_params / 384 / 2**30
    assert (round(in_gib * 6, 1), round(in_gib * 12, 1)) == (13.9, 27.7)  # per GPU, bf16 and fp32 state


@pytest.mark.parametrize(
    ("document_len", "attention", "model_total", "full_recompute"),
    [(65_536, 59.6, 366, 518), (16_384, 14.9, 232, 317), (8192, 7.4, 210, 283), (4096, 3.7, 199, 267)],
)
def test_the_reference_model_has_the_known_flops(
    document_len: int, attention: float, model_total: int, full_recompute: int
) -> None:
    flops = account(REFERENCE, seq_len=65_536, document_len=document_len).flops_per_token
    assert flops.documents is not None
    assert round(flops.linear_forward.total / 1e9, 1) == 62.5
    assert round(flops.documents.attention_forward / 1e9, 1) == attention
    assert round(flops.documents.model_total / 1e9) == model_total
    assert round(flops.documents.full_recompute_total / 1e9) == full_recompute


def test_a_document_longer_than_the_sequence_is_cut() -> None:
    flops = account(REFERENCE, seq_len=4096, document_len=8192).flops_per_token
    assert flops.documents == flops.full_causal


@pytest.mark.parametrize("experts", ["muon", "adamw"])
@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_optimizer_state_follows_the_choice_of_optimizers(experts: Any, matrices: Any) -> None:
    config = REFERENCE.model_copy(update={"num_dense_layers": 1, "dense_hidden_size": 512, "num_layers": 3})
    state = account(config, seq_len=8, optim=OptimConfig(experts=experts, matrices=matrices)).state_bytes
    muon = adamw = 0
    for name, parameter in _meta_model(config).named_parameters():
        kind = "adamw"
        if ".experts." in name:
            kind = experts
        elif any(part in name for part in ("attn.w", "shared.", "mlp.")):
            kind = matrices
        muon += parameter.numel() * (kind == "muon")
        adamw += parameter.numel() * (kind == "adamw")
    assert state.muon_momentum_fp32 == 4 * muon
    assert state.adamw_moments_fp32 == 8 * adamw
    assert state.parameters_fp32 == state.gradients_fp32 == 2 * state.parameters_bf16 == 4 * (muon + adamw)
    bias = 2 * 384 * 4
    assert state.checkpoint == 8 * muon + 12 * adamw + bias
    assert state.resident == 12 * muon + 16 * adamw + bias


def test_a_tied_matrix_counts_once_and_works_as_head() -> None:
    tied = account(REFERENCE.model_copy(update={"tie_embeddings": True}), seq_len=8)
    untied = account(REFERENCE, seq_len=8)
    assert untied.total_params - tied.total_params == REFERENCE.vocab_size * REFERENCE.hidden_size
    assert tied.active_params_without_embedding == tied.active_params == untied.active_params_without_embedding
    assert tied.flops_per_token.linear_forward == untied.flops_per_token.linear_forward


def test_json_holds_whole_numbers_only() -> None:
    figures = account(REFERENCE, seq_len=65_536, document_len=8192).to_json()
    assert json.loads(json.dumps(figures)) == figures
    assert set(figures) == {
        "total_params",
        "active_params",
        "active_params_without_embedding",
        "params_by_part",
        "flops_per_token",
        "state_bytes",
    }
    assert sum(figures["params_by_part"].values()) == figures["total_params"]

    def leaves(value: Any) -> list[Any]:
        return [leaf for v in value.values() for leaf in leaves(v)] if isinstance(value, dict) else [value]

    assert all(type(leaf) is int for leaf in leaves(figures))


def test_the_documentation_quotes_the_figures_of_the_code() -> None:
    """Every table of integers there is what `account` returns, row by row."""
    rows: dict[str, tuple[int, ...]] = {}
    for name, figures in re.findall(r"^\| `?([\w,]+)`? \|((?: [\d,]+ \|)+)$", DOCUMENT.read_text(), re.MULTILINE):
        rows[name] = tuple(int(figure.replace(",", "")) for figure in figures.split("|")[:-1])
    accounting = account(REFERENCE, seq_len=65_536).to_json()
    linear = accounting["flops_per_token"]["linear_forward"]
    expected: dict[str, tuple[int, ...]] = {
        part: (n, linear.get(part, 0)) for part, n in accounting["params_by_part"].items()
    }
    expected["total"] = (accounting["total_params"], accounting["flops_per_token"]["linear_forward_total"])
    expected |= {name: (n,) for name, n in accounting["state_bytes"].items()}
    expected |= {name: (accounting[name],) for name in accounting if name.startswith("active")}
    for length in (65_536, 16_384, 8192, 4096):
        flops = account(REFERENCE, seq_len=65_536, document_len=length).flops_per_token.documents
        assert flops is not None
        expected[f"{length:,}"] = (flops.attention_forward, flops.model_total, flops.full_recompute_total)
    assert rows == expected


def test_lengths_must_be_positive_and_all_problems_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        account(REFERENCE, seq_len=0, document_len=-4)
    assert [problem.split()[0] for problem in caught.value.problems] == ["seq_len", "document_len"]


def test_accounting_does_not_import_torch() -> None:
    code = "import sys, amalthea.plan.accounting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
