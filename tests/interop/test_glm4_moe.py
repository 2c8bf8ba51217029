"""The model against Hugging Face's class with the same weights: logits, gradients, and weights both ways.

Shape legend: B sequences, S tokens per sequence.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Glm4MoeForCausalLM

from amalthea.core.errors import CheckpointError, ConfigError, MissingDependencyError
from amalthea.data.batch import IGNORED
from amalthea.interop.glm4_moe import from_hf_state, to_hf_config, to_hf_state
from amalthea.kernels.attention import Documents
from amalthea.model.config import ModelConfig, MoEConfig
from amalthea.model.transformer import Transformer

TOLERANCE = 1e-5
SEQ_LEN = 48
SINGLE = ((SEQ_LEN,), (SEQ_LEN,))
PACKED = ((13, 1, 34), (20, 28))

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no qk_norm": {"qk_norm": False},
    "dense first layer": {"num_dense_layers": 1, "dense_hidden_size": 40},
    "dense only": {"num_dense_layers": 3, "dense_hidden_size": 40},
    "no shared expert": {"moe": {"num_shared_experts": 0}},
    "two shared experts": {"moe": {"num_shared_experts": 2}},
    "weights as scored, scaled": {"moe": {"normalize_weights": False, "route_scale": 2.5}},
    "tied": {"tie_embeddings": True},
    "one kv head, rope and eps": {"num_kv_heads": 1, "rope_theta": 500.0, "norm_eps": 1e-2},
}


def _config(*, moe: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    experts: dict[str, Any] = {
        "num_experts": 8,
        "top_k": 3,
        "expert_hidden_size": 16,
        "num_shared_experts": 1,
    }
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    rest: dict[str, Any] = {"head_dim": 16, "max_seq_len": 64, "loss_chunk_tokens": 20}
    return ModelConfig(**(shape | rest | changes), moe=MoEConfig(**(experts | (moe or {}))))


def _random_model(config: ModelConfig) -> Transformer:
    """Every weight and every router bias random, norms around 1: nothing may hide behind an initial value."""
    generator = torch.Generator().manual_seed(7)
    model = Transformer(config)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.2 * noise
        elif name.endswith("router.bias"):
            noise = 0.3 * noise
        else:
            noise = noise / tensor.shape[-1] ** 0.5
        tensor.copy_(noise)
    return model


def _hf_model(model: Transformer, *, attention: str = "eager", experts: str = "eager") -> Glm4MoeForCausalLM:
    hf_config = to_hf_config(model.config)
    hf_config._attn_implementation, hf_config._experts_implementation = attention, experts
    hf_model = Glm4MoeForCausalLM(hf_config)
    hf_model.load_state_dict(to_hf_state(model.state_dict(), model.config), strict=False)
    hf_model.tie_weights()
    return hf_model


def _batch(lengths: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    """Random tokens and labels [B, S]; a document's last token has no label."""
    tokens = torch.randint(61, (len(lengths), SEQ_LEN), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, dims=1)
    for row, documents in enumerate(lengths):
        labels[row, torch.tensor(documents).cumsum(0) - 1] = IGNORED
    return tokens, labels


def _hf_logits(hf_model: Glm4MoeForCausalLM, tokens: Tensor, lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    """Hugging Face's logits under a block-diagonal causal mask, position ids running through the sequence."""
    blocks = [torch.block_diag(*(torch.ones(n, n).tril() for n in documents)) for documents in lengths]
    mask = torch.zeros(len(lengths), 1, SEQ_LEN, SEQ_LEN)
    mask.masked_fill_(torch.stack(blocks)[:, None] == 0, torch.finfo(torch.float32).min)
    positions = torch.arange(SEQ_LEN).expand_as(tokens)
    return hf_model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits


def _assert_close(ours: Tensor, theirs: Tensor, name: str) -> None:
    error, scale = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    assert error <= TOLERANCE * scale, f"{name}: differs by {error:.2e}, largest value {scale:.2e}"


@pytest.mark.parametrize("lengths", [SINGLE, PACKED], ids=["single", "packed"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_and_gradients_equal_hugging_face(variant: dict[str, Any], lengths: tuple[tuple[int, ...], ...]) -> None:
    model = _random_model(_config(**variant))
    hf_model = _hf_model(model)
    tokens, labels = _batch(lengths)
    documents = Documents.of(lengths, SEQ_LEN)
    num_labels = int((labels != IGNORED).sum())

    logits = _hf_logits(hf_model, tokens, lengths)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    our_loss = model(tokens, documents, labels).result / num_labels
    our_loss.backward()

    _assert_close(model(tokens, documents).result, logits, "logits")
    _assert_close(our_loss, loss, "loss")
    # Our gradients under their names: the map of weights serves, with zeros for the biases, which have none.
    gradients = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    gradients |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if model.config.tie_embeddings:
        del gradients["head.weight"]
    ours = to_hf_state(gradients, model.config)
    compared = 0
    for name, parameter in hf_model.named_parameters():
        if parameter.numel():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
            _assert_close(ours[name], parameter.grad, name)
            compared += 1
    # Gate and up are one tensor there.
    assert compared == len(list(model.parameters())) - len(model.moe_layers())


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_hugging_face_implementation_gives_our_logits(attention: str, experts: str) -> None:
    model = _random_model(_config())
    hf_model = _hf_model(model, attention=attention, experts=experts)
    tokens, _ = _batch(PACKED)
    with torch.no_grad():
        ours = model(tokens, Documents.of(PACKED, SEQ_LEN)).result
        _assert_close(ours, _hf_logits(hf_model, tokens, PACKED), "logits")


def test_bias_and_masks_matter_in_these_models() -> None:
    """Guards the comparisons above: were either without effect, both sides could ignore it and agree."""
    model = _random_model(_config())
    tokens, _ = _batch(PACKED)
    with torch.no_grad():
        packed = model(tokens, Documents.of(PACKED, SEQ_LEN))
        whole = model(tokens, Documents.whole(2, SEQ_LEN))
        for moe in model.moe_layers():
            moe.router.bias.zero_()
        unbiased = model(tokens, Documents.of(PACKED, SEQ_LEN))
    assert (packed.result - whole.result).abs().max() > 0.1
    assert (packed.counts - unbiased.counts).abs().max() > 10


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_weights_return_exactly(variant: dict[str, Any]) -> None:
    model = _random_model(_config(**variant))
    state, hf_model = model.state_dict(), _hf_model(model)
    returned = from_hf_state(hf_model.state_dict(), model.config)
    assert returned.keys() == state.keys()
    assert all(torch.equal(returned[name], state[name]) for name in state)
    fresh = Transformer(model.config)
    fresh.load_state_dict(returned)
    exported = to_hf_state(fresh.state_dict(), model.config)
    assert all(torch.equal(exported[name], hf_model.state_dict()[name]) for name in exported)


def test_saved_weights_load_through_from_pretrained(tmp_path: Path) -> None:
    model = _random_model(_config(num_dense_layers=1, dense_hidden_size=40))
    save_file(
        to_hf_state(model.state_dict(), model.config),
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    to_hf_config(model.config).save_pretrained(tmp_path)
    hf_model, info = Glm4MoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    tokens, _ = _batch(SINGLE)
    with torch.no_grad():
        ours = model(tokens, Documents.whole(2, SEQ_LEN)).result
        _assert_close(ours, hf_model(tokens).logits, "logits")


def test_one_expert_is_refused_because_the_class_fails_on_it() -> None:
    config = _config(moe={"num_experts": 1, "top_k": 1})
    with pytest.raises(ConfigError, match=r"model\.moe\.num_experts is 1"):
        to_hf_config(config)
    hf_config = to_hf_config(_config(moe={"top_k": 1}))
    hf_config.n_routed_experts = 1
    with pytest.raises(RuntimeError, match="out of range"):
        Glm4MoeForCausalLM(hf_config)(torch.tensor([[1, 2]]))
    to_hf_config(_config(moe={"num_experts": 1, "top_k": 1}, num_dense_layers=3, dense_hidden_size=40))


def test_states_of_another_shape_are_refused_by_name() -> None:
    model = _random_model(_config())
    with pytest.raises(CheckpointError, match=r"has the unknown .*k_norm"):
        to_hf_state(model.state_dict(), _config(qk_norm=False))
    hf_state = to_hf_state(model.state_dict(), model.config)
    del hf_state["model.layers.1.mlp.gate.e_score_correction_bias"]
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.gate\.e_score_correction_bias"):
        from_hf_state(hf_state, model.config)


def test_a_head_of_its_own_is_not_dropped_as_tied() -> None:
    state = _random_model(_config()).state_dict()
    with pytest.raises(CheckpointError, match=r"head\.weight is another matrix than embed\.weight"):
        to_hf_state(state, _config(tie_embeddings=True))


def test_missing_transformers_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"amalthea\[hf\]"):
        to_hf_config(_config())
