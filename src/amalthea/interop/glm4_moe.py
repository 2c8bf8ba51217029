"""The model family as Hugging Face's `Glm4MoeForCausalLM`: configuration and weights, both ways.

Logits and gradients agree to fp32 rounding. Tensors keep their dtype; all but the experts' gate and up are
passed on as they are, without a copy.

Letters: D hidden, E experts, F expert hidden. Ours are `w_gate` and `w_up` [E, F, D], theirs is
`gate_up_proj` [E, 2F, D], gate first: Muon must see them apart, so they are fused only on the way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amalthea.core.errors import CheckpointError, ConfigError, MissingDependencyError
from amalthea.model.config import ModelConfig

if TYPE_CHECKING:
    from transformers import Glm4MoeConfig

EMBED, HF_EMBED = "embed.weight", "model.embed_tokens.weight"
HEAD, HF_HEAD = "head.weight", "lm_head.weight"

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.wq.weight": "self_attn.q_proj.weight",
    "attn.wk.weight": "self_attn.k_proj.weight",
    "attn.wv.weight": "self_attn.v_proj.weight",
    "attn.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
QK_NORM_NAMES = {
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
}
DENSE_NAMES = {
    "mlp.w_gate.weight": "mlp.gate_proj.weight",
    "mlp.w_up.weight": "mlp.up_proj.weight",
    "mlp.w_down.weight": "mlp.down_proj.weight",
}
MOE_NAMES = {
    "moe.router.weight": "mlp.gate.weight",
    "moe.router.bias": "mlp.gate.e_score_correction_bias",
    "moe.experts.w_down": "mlp.experts.down_proj",
}
SHARED_NAMES = {
    "moe.shared.w_gate.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared.w_up.weight": "mlp.shared_experts.up_proj.weight",
    "moe.shared.w_down.weight": "mlp.shared_experts.down_proj.weight",
}
GATE, UP, HF_GATE_UP = "moe.experts.w_gate", "moe.experts.w_up", "mlp.experts.gate_up_proj"


def to_hf_config(model: ModelConfig) -> Glm4MoeConfig:
    """Return the `Glm4MoeConfig` of a model with this shape.

    What only training uses (bias_update_rate, loss coefficients, loss_chunk_tokens) has no place there.

    Raises ConfigError naming the setting that the class cannot hold, MissingDependencyError without
    transformers.
    """
    check_exportable(model)
    try:
        from transformers import Glm4MoeConfig
    except ImportError as error:
        raise MissingDependencyError(
            "transformers is not installed, and Hugging Face export needs it: pip install 'amalthea[hf]'"
        ) from error
    # A dictionary, because head_dim is read by the class but not among its declared settings.
    settings: dict[str, Any] = dict(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.dense_hidden_size or model.moe.expert_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden_act="silu",
        max_position_embeddings=model.max_seq_len,
        initializer_range=model.init_std,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": model.rope_theta,
            "partial_rotary_factor": 1.0,
        },
        attention_bias=False,
        moe_intermediate_size=model.moe.expert_hidden_size,
        num_experts_per_tok=model.moe.top_k,
        n_shared_experts=model.moe.num_shared_experts,
        n_routed_experts=model.moe.num_experts,
        routed_scaling_factor=model.moe.route_scale,
        norm_topk_prob=model.moe.normalize_weights,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=model.num_dense_layers,
        use_qk_norm=model.qk_norm,
        num_mtp_layers=0,
    )
    return Glm4MoeConfig(**settings)


def check_exportable(model: ModelConfig) -> None:
    """Raise ConfigError naming every setting of `model` that `Glm4MoeForCausalLM` cannot hold."""
    problems = []
    if model.moe.num_experts < 2 and model.num_dense_layers < model.num_layers:
        problems.append(
            f"model.moe.num_experts is {model.moe.num_experts}, but Glm4MoeForCausalLM picks the best two "
            "experts of a group and needs 2 or more; only a model with more experts can be exported"
        )
    if problems:
        raise ConfigError(*problems)


def to_hf_state(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return whole (unsharded) weights and router biases under Hugging Face's names.

    `state` is a `Transformer.state_dict()`. Where the model has no shared experts, the class still wants
    their matrices: they are empty. A tied head is left out, as in Hugging Face's files.

    Raises ConfigError where the class cannot hold the model, CheckpointError where a parameter is missing or
    unknown, or a tied head is not the embedding. Communication: none. Memory: one copy of the gate and up
    matrices.
    """
    check_exportable(model)
    names = _one_to_one(model)
    moe_layers = range(model.num_dense_layers, model.num_layers)
    fused = {f"blocks.{i}.{part}" for i in moe_layers for part in (GATE, UP)}
    _check_names(
        state,
        names.keys() | fused,
        optional=_tied_head(state, model, EMBED, HEAD),
        subject="the model's state",
    )

    hf_state = {theirs: state[ours] for ours, theirs in names.items()}
    for i in moe_layers:
        gate, up = (state[f"blocks.{i}.{part}"] for part in (GATE, UP))
        hf_state[f"model.layers.{i}.{HF_GATE_UP}"] = torch.cat((gate, up), dim=1)
        if model.moe.num_shared_experts == 0:
            hf_state |= {f"model.layers.{i}.{name}": empty for name, empty in _empty_shared(gate).items()}
    return hf_state


def from_hf_state(hf_state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of a `Glm4MoeForCausalLM.state_dict()` under our names: `to_hf_state` undone.

    The result is what `Transformer.load_state_dict` takes; a tied head is there, as the embedding's tensor.

    Raises ConfigError where the class cannot hold the model, CheckpointError where a parameter is missing or
    unknown, or a tied head is not the embedding. Communication: none. Memory: one copy of the gate and up
    matrices.
    """
    check_exportable(model)
    names = _one_to_one(model)
    moe_layers = range(model.num_dense_layers, model.num_layers)
    expected = {*names.values(), *(f"model.layers.{i}.{HF_GATE_UP}" for i in moe_layers)}
    optional = _tied_head(hf_state, model, HF_EMBED, HF_HEAD)
    if model.moe.num_shared_experts == 0:
        optional |= {f"model.layers.{i}.{name}" for i in moe_layers for name in SHARED_NAMES.values()}
    _check_names(hf_state, expected, optional=optional, subject="the Hugging Face state")

    state = {ours: hf_state[theirs] for ours, theirs in names.items()}
    for i in moe_layers:
        # Copies, so that neither half keeps the fused tensor alive.
        gate, up = (half.clone() for half in hf_state[f"model.layers.{i}.{HF_GATE_UP}"].chunk(2, dim=1))
        state |= {f"blocks.{i}.{GATE}": gate, f"blocks.{i}.{UP}": up}
    if model.tie_embeddings:
        state[HEAD] = state[EMBED]
    return state


def _one_to_one(model: ModelConfig) -> dict[str, str]:
    """Our name → theirs, for every tensor that differs in name only."""
    names = {EMBED: HF_EMBED, "norm.weight": "model.norm.weight"}
    if not model.tie_embeddings:
        names[HEAD] = HF_HEAD
    for i in range(model.num_layers):
        layer = LAYER_NAMES | (QK_NORM_NAMES if model.qk_norm else {})
        if i < model.num_dense_layers:
            layer |= DENSE_NAMES
        else:
            layer |= MOE_NAMES | (SHARED_NAMES if model.moe.num_shared_experts else {})
        names |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in layer.items()}
    return names


def _empty_shared(like: Tensor) -> dict[str, Tensor]:
    """The zero-width shared expert of a layer whose experts' gate is `like` [E, F, D]."""
    hidden = like.shape[2]
    gate, up, down = SHARED_NAMES.values()
    return {
        gate: like.new_empty(0, hidden),
        up: like.new_empty(0, hidden),
        down: like.new_empty(hidden, 0),
    }


def _tied_head(state: Mapping[str, Tensor], model: ModelConfig, embed: str, head: str) -> set[str]:
    """The head's name where the embedding stands in for it, checked to be the same where both are given."""
    if not model.tie_embeddings:
        return set()
    if head in state and embed in state and not torch.equal(state[head], state[embed]):
        raise CheckpointError(
            f"model.tie_embeddings is set, but {head} is another matrix than {embed}; unset it to keep both"
        )
    return {head}


def _check_names(state: Mapping[str, Tensor], expected: set[str], *, optional: set[str], subject: str) -> None:
    problems = []
    if missing := sorted(expected - state.keys()):
        problems.append(f"lacks {_listed(missing)}")
    if unknown := sorted(state.keys() - expected - optional):
        problems.append(f"has the unknown {_listed(unknown)}")
    if problems:
        raise CheckpointError(
            f"{subject} does not fit the model's configuration: it {' and '.join(problems)}; "
            "use the configuration that the weights were made with"
        )


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
