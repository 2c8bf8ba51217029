"""The shape of a model: one family, decoder-only, mixture of experts."""

from __future__ import annotations

from typing import Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from amalthea.core.component import Component


class MoEConfig(Component):
    """Routed and shared experts of one layer."""

    num_experts: PositiveInt
    """Routed experts in each layer."""
    top_k: PositiveInt
    """Routed experts that each token visits."""
    expert_hidden_size: PositiveInt
    """Width F of one expert's SwiGLU."""
    num_shared_experts: NonNegativeInt = 1
    """Experts that every token visits, as one SwiGLU of width F times this."""
    normalize_weights: bool = True
    """Divide the chosen scores by their sum."""
    route_scale: PositiveFloat = 1.0
    """Factor on the routed experts' weights."""
    bias_update_rate: NonNegativeFloat = 1e-3
    """Step of the load-balance bias, once per optimizer step; 0 switches balancing off."""
    aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the sequence-wise balance loss."""
    z_loss_coef: NonNegativeFloat = 0.0
    """Weight of the mean squared log-sum-exp of the router's logits."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, more than num_experts {self.num_experts}; lower top_k")
        return self


class ModelConfig(Component):
    """A decoder-only transformer: RMSNorm, GQA, RoPE, SwiGLU, mixture of experts."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    moe: MoEConfig
    num_dense_layers: NonNegativeInt = 0
    """How many of the first layers have a dense SwiGLU in place of experts."""
    dense_hidden_size: PositiveInt | None = None
    """Width of the dense layers' SwiGLU; needed where there are any."""
    qk_norm: bool = True
    """RMSNorm on each head's queries and keys before RoPE."""
    rope_theta: PositiveFloat = 10_000.0
    max_seq_len: PositiveInt = 4096
    """Positions in the shared RoPE cache."""
    norm_eps: PositiveFloat = 1e-5
    tie_embeddings: bool = False
    init_std: PositiveFloat = 0.02
    loss_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time in the vocabulary loss."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim is {self.head_dim}; RoPE turns pairs, so it must be even")
        if self.num_dense_layers > self.num_layers:
            problems.append(f"num_dense_layers {self.num_dense_layers} exceeds num_layers {self.num_layers}")
        if self.num_dense_layers and self.dense_hidden_size is None:
            problems.append("num_dense_layers is set but dense_hidden_size is not; give the dense layers a width")
        if problems:
            raise ValueError("; ".join(problems))
        return self
