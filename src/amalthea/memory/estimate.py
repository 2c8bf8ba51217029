"""How many bytes of activations a forward pass keeps for backward: a formula, from the configuration alone.

An *estimate* in this project's sense: what autograd saves in one process in fp32 on a CPU, each sequence one document,
everything larger than one number a layer. Kernels on other devices keep about the same (no fp32 statistics, other
paddings); the traced plan is exact there.

Shape legend: T tokens of one pass, D hidden, H query heads, G key/value heads, d head dim, E experts, K choices per
token, F expert hidden, S shared experts' hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from amalthea.memory.config import Kept, MemoryConfig
from amalthea.model.config import ModelConfig

_FP32, _INT64 = 4, 8


@dataclass(frozen=True)
class KeptActivations:
    """Bytes kept on the device at the end of a forward pass, and on the host."""

    boundaries_bytes: int
    """Inputs of recomputed groups that stay on the device."""
    blocks_bytes: int
    """All else that blocks keep: everything without recompute, what `keep` names with selective recompute."""
    loss_bytes: int
    """The final norm's input and the loss's two gradients, which are made in forward."""
    host_bytes: int = 0
    """Boundaries that travelled."""

    @property
    def device_bytes(self) -> int:
        return self.boundaries_bytes + self.blocks_bytes + self.loss_bytes


def kept_activations(model: ModelConfig, memory: MemoryConfig, *, pass_tokens: int) -> KeptActivations:
    """For one forward pass of `sequences_per_gather` passes of `pass_tokens` tokens each.

    Without a budget for offload; with one, more boundaries stay. Source: ours, counted from what each layer saves.
    """
    tokens = pass_tokens * memory.sequences_per_gather
    groups = -(-model.num_layers // memory.blocks_per_group)
    boundary = tokens * model.hidden_size * _FP32
    loss = tokens * (2 * model.hidden_size + 1) * _FP32 + model.vocab_size * model.hidden_size * _FP32
    if memory.recompute == "none":
        per_token = sum(block_bytes(model, is_dense=layer < model.num_dense_layers) for layer in _layers(model))
        return KeptActivations(0, tokens * per_token, loss)
    kept = 0
    if memory.recompute == "selective":
        kept = sum(
            output_bytes(model, name, is_dense=layer < model.num_dense_layers)
            for layer in _layers(model)
            for name in memory.keep
        )
    if not memory.offload:
        return KeptActivations(groups * boundary, tokens * kept, loss)
    # The last group's stays; two more may be on their way, and have been waited for only in backward.
    held = min(2, (groups - 1) * memory.sequences_per_gather) * pass_tokens * model.hidden_size * _FP32
    return KeptActivations(boundary + held, tokens * kept, loss, (groups - 1) * boundary)


def block_bytes(model: ModelConfig, *, is_dense: bool) -> int:
    """Bytes per token that one block saves without recompute, its input among them."""
    D, H, G, d = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    norms = 2 * (2 * D + 1)
    projected = (H + 2 * G) * d
    rotated = (H + G) * d + (H + G if model.qk_norm else 0)
    if not model.qk_norm:
        projected = G * d  # queries and keys are wanted after their rotation only
    attended = H * d + H
    return (norms + projected + rotated + attended) * _FP32 + (_dense_bytes(model) if is_dense else _moe_bytes(model))


def output_bytes(model: ModelConfig, name: Kept, *, is_dense: bool) -> int:
    """Bytes per token that the named operations of one block return and recompute takes from there.

    Not a block's last products: recompute ends before them, but for blocks that others follow in their group.
    """
    D, H, G, d, moe = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim, model.moe
    shared = moe.num_shared_experts * moe.expert_hidden_size
    if name == "attention":
        return (H * d + H) * _FP32
    if name == "projections":
        inner = (model.dense_hidden_size or 0) if is_dense else shared
        router = 0 if is_dense else moe.num_experts
        return ((H + 2 * G) * d + D + router + 2 * inner) * _FP32
    if name == "experts":
        return 0 if is_dense else moe.top_k * 2 * moe.expert_hidden_size * _FP32
    return 0  # all_to_all: one process has none


def _dense_bytes(model: ModelConfig) -> int:
    return 3 * (model.dense_hidden_size or 0) * _FP32


def _moe_bytes(model: ModelConfig) -> int:
    moe = model.moe
    K, F = moe.top_k, moe.expert_hidden_size
    scores = moe.num_experts + K + 1 if moe.normalize_weights else moe.num_experts
    rows = K * (model.hidden_size + 3 * F + 1)
    shared = 3 * moe.num_shared_experts * F
    indices = 3 * K  # choices, and both directions of the sort
    return (scores + rows + shared) * _FP32 + indices * _INT64


def _layers(model: ModelConfig) -> range:
    return range(model.num_layers)
