"""The model as a whole: its outputs agree with each other, and any small configuration trains.

Shape legend: B sequences, S tokens per sequence, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import small_batch, small_model, small_model_config

from amalthea.kernels.attention import Documents
from amalthea.model.config import ModelConfig


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads, experts = draw(st.integers(1, 2)), draw(st.integers(1, 6))
    overrides: dict[str, Any] = {
        "vocab_size": draw(st.integers(3, 40)),
        "hidden_size": 4 * draw(st.integers(1, 5)),
        "num_layers": draw(st.integers(1, 3)),
        "num_heads": kv_heads * draw(st.integers(1, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 4)),
        "max_seq_len": draw(st.integers(4, 12)),
        "qk_norm": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
        "loss_chunk_tokens": draw(st.integers(1, 30)),
        "dense_hidden_size": 4 * draw(st.integers(1, 3)),
        "moe__num_experts": experts,
        "moe__top_k": draw(st.integers(1, experts)),
        "moe__expert_hidden_size": 4 * draw(st.integers(1, 3)),
        "moe__num_shared_experts": draw(st.integers(0, 2)),
        "moe__normalize_weights": draw(st.booleans()),
        "moe__route_scale": draw(st.floats(0.5, 3)),
        "moe__aux_loss_coef": draw(st.sampled_from([0.0, 0.01])),
        "moe__z_loss_coef": draw(st.sampled_from([0.0, 0.01])),
    }
    overrides["num_dense_layers"] = draw(st.integers(0, overrides["num_layers"]))
    return small_model_config(**overrides)


@given(config=configs(), batch=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_any_small_model_has_finite_gradients_for_every_parameter(config: ModelConfig, batch: int) -> None:
    model = small_model(config)
    tokens, documents, labels = small_batch(config, batch=batch)
    output = model(tokens, documents, labels)
    (output.result + output.router_losses.sum()).backward()
    assert output.result.isfinite()
    assert output.counts.sum().item() == len(model.moe_layers()) * tokens.numel() * config.moe.top_k
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # With one choice the normalised weight is 1 whatever the score, and with one key the softmax is.
        is_flat = config.moe.top_k == 1 and ".router." in name
        assert is_flat or parameter.grad.any() or ".experts." in name, f"{name} gets no gradient"


def test_losses_follow_from_the_logits() -> None:
    config = small_model_config()
    model = small_model(config)
    tokens, documents, labels = small_batch(config)
    logits = model(tokens, documents).result
    assert logits.shape == (2, 16, 50)
    expected = F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="none").view(2, 16)
    by_token = model(tokens, documents, labels, per_token=True).result
    torch.testing.assert_close(by_token.double(), expected, rtol=1e-5, atol=1e-5)
    summed = model(tokens, documents, labels).result
    torch.testing.assert_close(summed.double(), expected.sum(), rtol=1e-5, atol=1e-5)


def test_a_document_alone_gives_the_logits_that_it_gives_when_packed() -> None:
    config = small_model_config()
    model = small_model(config)
    tokens, documents, _ = small_batch(config)
    packed = model(tokens, documents).result
    alone = model(tokens[:, 3:], Documents.whole(2, 13)).result
    torch.testing.assert_close(packed[:, 3:], alone, rtol=1e-4, atol=1e-4)
    joined = model(tokens, Documents.whole(2, 16)).result
    assert not torch.allclose(packed[:, 3:], joined[:, 3:], rtol=1e-2, atol=1e-2)


def test_a_sequence_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    config = small_model_config()
    model = small_model(config)
    tokens, documents, _ = small_batch(config)
    both = model(tokens, documents).result
    first = model(tokens[:1], Documents.of(documents.lengths[:1], 16)).result
    torch.testing.assert_close(both[:1], first, rtol=1e-5, atol=1e-5)
