"""Exact parameters, FLOP per token and bytes of state of a model, from its configuration alone.

Everything is integer arithmetic: no tensor is made and torch is not imported. `docs/concepts/accounting.md`
explains the conventions with the reference model's figures.

Letters: H query heads, d head width, C the length of a document, K experts per token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from amalthea.core.errors import ConfigError
from amalthea.model.config import ModelConfig
from amalthea.optim.config import OptimConfig

FP32_BYTES = 4
BF16_BYTES = 2


@dataclass(frozen=True)
class ParamsByPart:
    """Parameters by what they do; the load-balance bias is a buffer and not among them."""

    embedding: int
    attention: int
    """Projections of queries, keys, values and output; QK-norm weights are in `norms`."""
    router: int
    routed_experts: int
    shared_experts: int
    dense_mlp: int
    norms: int
    head: int
    """0 where the head is the embedding's matrix."""

    @property
    def total(self) -> int:
        """All parameters; a tied matrix counts once."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class LinearFlops:
    """FLOP of one token's matrix products with parameters, forward: 2 per parameter that it meets."""

    attention: int
    router: int
    routed_experts: int
    """Of the K experts that the token visits."""
    shared_experts: int
    dense_mlp: int
    head: int

    @property
    def total(self) -> int:
        """Sum over the parts."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ContextFlops:
    """FLOP per token where every document has `context_tokens` tokens.

    `attention_forward` is scores and values, masked pairs left out. `model_total` is three times forward:
    the usual numerator of MFU. `full_recompute_total` is what a device carries out when every block is
    recomputed: four times linear forward, and 4.5 times attention forward, because a flash backward forms
    the scores again (five products where forward has two: forward 1, recompute 1, backward 2.5). The head is
    among the four times: the chunked loss forms its logits again in backward.
    """

    context_tokens: int
    attention_forward: int
    model_total: int
    full_recompute_total: int


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOP per token; a multiply and an add are two. Norms, RoPE, softmax and activations are left out."""

    linear_forward: LinearFlops
    full_causal: ContextFlops
    """One document fills the sequence."""
    documents: ContextFlops | None
    """Documents of `document_len`, each attending to itself; none where no length was given."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one replica's whole state, over all its ranks: an estimate, no measurement."""

    parameters_fp32: int
    gradients_fp32: int
    muon_momentum_fp32: int
    """One buffer per parameter that Muon takes."""
    adamw_moments_fp32: int
    """Two buffers per parameter that AdamW takes."""
    load_balance_bias_fp32: int
    parameters_bf16: int
    """A bf16 copy of every parameter, were all layers gathered at once."""

    @property
    def resident(self) -> int:
        """What an optimizer step needs at once: the checkpoint's tensors and the gradients, in fp32."""
        return self.checkpoint + self.gradients_fp32

    @property
    def checkpoint(self) -> int:
        """Tensor bytes of a checkpoint: parameters, optimizer state and the load-balance bias, in fp32."""
        state = self.muon_momentum_fp32 + self.adamw_moments_fp32
        return self.parameters_fp32 + state + self.load_balance_bias_fp32


@dataclass(frozen=True)
class Accounting:
    """The figures of one model; `account` makes it."""

    params_by_part: ParamsByPart
    total_params: int
    active_params: int
    """Parameters less those of the routed experts that a token does not visit."""
    active_params_without_embedding: int
    """Without the input embedding, which is looked up. A tied matrix stays: the head multiplies by it."""
    flops_per_token: FlopsPerToken
    state_bytes: StateBytes

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain dictionaries of integers, ready for `json.dumps`."""
        flops, state = asdict(self.flops_per_token), asdict(self.state_bytes)
        flops["linear_forward_total"] = self.flops_per_token.linear_forward.total
        state |= {"resident": self.state_bytes.resident, "checkpoint": self.state_bytes.checkpoint}
        return {
            "total_params": self.total_params,
            "active_params": self.active_params,
            "active_params_without_embedding": self.active_params_without_embedding,
            "params_by_part": asdict(self.params_by_part),
            "flops_per_token": flops,
            "state_bytes": state,
        }


def account(
    model: ModelConfig, *, seq_len: int, document_len: int | None = None, optim: OptimConfig | None = None
) -> Accounting:
    """Count parameters, FLOP per token and bytes of state of `model` exactly.

    `seq_len` and `document_len` are tokens; a document longer than the sequence is cut to it. `optim` says
    which optimizer takes which matrices (default: Muon all of them).

    Raises ConfigError where a length is not positive. Communication: none. Source: ours; model FLOP as in the
    PaLM report (arXiv 2204.02311, appendix B), with masked pairs left out.
    """
    lengths = {"seq_len": seq_len} | ({} if document_len is None else {"document_len": document_len})
    if problems := [f"{name} is {n}; give 1 token or more" for name, n in lengths.items() if n < 1]:
        raise ConfigError(*problems)

    params = _params_by_part(model)
    linear = _linear_flops(model, params)
    unvisited = params.routed_experts // model.moe.num_experts * (model.moe.num_experts - model.moe.top_k)
    active = params.total - unvisited
    flops = FlopsPerToken(
        linear_forward=linear,
        full_causal=_context_flops(model, linear.total, seq_len),
        documents=_context_flops(model, linear.total, min(document_len, seq_len)) if document_len else None,
    )
    return Accounting(
        params_by_part=params,
        total_params=params.total,
        active_params=active,
        active_params_without_embedding=active if model.tie_embeddings else active - params.embedding,
        flops_per_token=flops,
        state_bytes=_state_bytes(model, params, optim or OptimConfig()),
    )


def _params_by_part(model: ModelConfig) -> ParamsByPart:
    moe, layers, hidden = model.moe, model.num_layers, model.hidden_size
    moe_layers = layers - model.num_dense_layers
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    expert = 3 * hidden * moe.expert_hidden_size  # gate, up, down
    vocabulary = model.vocab_size * hidden
    norms_of_layer = 2 * hidden + (2 * model.head_dim if model.qk_norm else 0)
    return ParamsByPart(
        embedding=vocabulary,
        attention=layers * hidden * (2 * query + 2 * key_value),
        router=moe_layers * moe.num_experts * hidden,
        routed_experts=moe_layers * moe.num_experts * expert,
        shared_experts=moe_layers * moe.num_shared_experts * expert,
        dense_mlp=model.num_dense_layers * 3 * hidden * (model.dense_hidden_size or 0),
        norms=layers * norms_of_layer + hidden,
        head=0 if model.tie_embeddings else vocabulary,
    )


def _linear_flops(model: ModelConfig, params: ParamsByPart) -> LinearFlops:
    return LinearFlops(
        attention=2 * params.attention,
        router=2 * params.router,
        routed_experts=2 * params.routed_experts // model.moe.num_experts * model.moe.top_k,
        shared_experts=2 * params.shared_experts,
        dense_mlp=2 * params.dense_mlp,
        head=2 * model.vocab_size * model.hidden_size,
    )


def _context_flops(model: ModelConfig, linear: int, context: int) -> ContextFlops:
    # A token sees (C + 1) / 2 positions on average; each costs 2·H·d for its score and 2·H·d for its value.
    attention = model.num_layers * 2 * model.num_heads * model.head_dim * (context + 1)
    return ContextFlops(
        context_tokens=context,
        attention_forward=attention,
        model_total=3 * (linear + attention),
        full_recompute_total=4 * linear + 9 * attention // 2,
    )


def _state_bytes(model: ModelConfig, params: ParamsByPart, optim: OptimConfig) -> StateBytes:
    matrices = params.attention + params.shared_experts + params.dense_mlp
    muon = params.routed_experts * (optim.experts == "muon") + matrices * (optim.matrices == "muon")
    moe_layers = model.num_layers - model.num_dense_layers
    return StateBytes(
        parameters_fp32=params.total * FP32_BYTES,
        gradients_fp32=params.total * FP32_BYTES,
        muon_momentum_fp32=muon * FP32_BYTES,
        adamw_moments_fp32=2 * (params.total - muon) * FP32_BYTES,
        load_balance_bias_fp32=moe_layers * model.moe.num_experts * FP32_BYTES,
        parameters_bf16=params.total * BF16_BYTES,
    )
