"""Small models in one process: configurations, inputs and initialised weights."""

from __future__ import annotations

from typing import Any

import torch

from amalthea.kernels.attention import Documents
from amalthea.model.config import ModelConfig
from amalthea.model.init import initialize
from amalthea.model.transformer import Transformer


def small_model_config(**overrides: Any) -> ModelConfig:
    """Two layers of eight experts, hidden size 16; overrides are `a__b=c`."""
    values: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_seq_len": 16,
        "moe": {"num_experts": 8, "top_k": 2, "expert_hidden_size": 8},
        "init_std": 0.2,
        "loss_chunk_tokens": 5,
    }
    for key, value in overrides.items():
        node = values
        *path, last = key.split("__")
        for part in path:
            node = node[part]
        node[last] = value
    return ModelConfig.model_validate(values)


def small_model(config: ModelConfig | None = None, *, seed: int = 0) -> Transformer:
    """Built on meta and initialised, as a run does."""
    with torch.device("meta"):
        model = Transformer(config or small_model_config())
    model.to_empty(device="cpu")
    initialize(model, seed=seed)
    return model


def small_batch(config: ModelConfig, *, batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, Documents, torch.Tensor]:
    """Tokens, documents (two in each sequence) and labels."""
    seq_len = config.max_seq_len
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, seq_len), generator=generator)
    labels = torch.randint(config.vocab_size, (batch, seq_len), generator=generator)
    labels[:, 2] = -100
    return tokens, Documents.of([(3, seq_len - 3)] * batch, seq_len), labels
