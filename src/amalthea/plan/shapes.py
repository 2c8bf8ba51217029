"""Names and shapes of a model's parameters, from its configuration alone: no tensor is made, torch is not imported.

Letters: V vocabulary, D hidden, H query heads, G key/value heads, d head width, E experts, F expert hidden,
S shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from amalthea.model.config import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(model: ModelConfig) -> list[tuple[str, Shape]]:
    """(name, global shape) of every parameter, in the order of `Transformer(model).named_parameters()`.

    The order matters: plans number parameters by it. A head tied to the embedding is no parameter of its own.
    """
    vocabulary = (model.vocab_size, model.hidden_size)
    return [
        ("embed.weight", vocabulary),
        *(entry for layer in range(model.num_layers) for entry in _block(model, layer)),
        ("norm.weight", (model.hidden_size,)),
        *([] if model.tie_embeddings else [("head.weight", vocabulary)]),
    ]


def _block(model: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    prefix, hidden = f"blocks.{layer}", model.hidden_size
    yield f"{prefix}.attn_norm.weight", (hidden,)
    yield from _attention(model, f"{prefix}.attn")
    yield f"{prefix}.ffn_norm.weight", (hidden,)
    if layer < model.num_dense_layers:
        assert model.dense_hidden_size is not None
        yield from _swiglu(f"{prefix}.mlp", hidden, model.dense_hidden_size)
        return
    moe = model.moe
    yield f"{prefix}.moe.router.weight", (moe.num_experts, hidden)
    for name in ("w_gate", "w_up"):
        yield f"{prefix}.moe.experts.{name}", (moe.num_experts, moe.expert_hidden_size, hidden)
    yield f"{prefix}.moe.experts.w_down", (moe.num_experts, hidden, moe.expert_hidden_size)
    if moe.num_shared_experts:
        yield from _swiglu(f"{prefix}.moe.shared", hidden, moe.num_shared_experts * moe.expert_hidden_size)


def _attention(model: ModelConfig, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, query, key_value = (
        model.hidden_size,
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
    )
    yield f"{prefix}.wq.weight", (query, hidden)
    yield f"{prefix}.wk.weight", (key_value, hidden)
    yield f"{prefix}.wv.weight", (key_value, hidden)
    yield f"{prefix}.wo.weight", (hidden, query)
    if model.qk_norm:
        yield f"{prefix}.q_norm.weight", (model.head_dim,)
        yield f"{prefix}.k_norm.weight", (model.head_dim,)


def _swiglu(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.w_gate.weight", (inner, hidden)
    yield f"{prefix}.w_up.weight", (inner, hidden)
    yield f"{prefix}.w_down.weight", (hidden, inner)
