"""A configuration small enough to build in milliseconds."""

from __future__ import annotations

from amalthea.config.run import RunConfig, TrainConfig
from amalthea.data.config import DataConfig, TokenizerConfig
from amalthea.model.config import ModelConfig, MoEConfig
from amalthea.optim.config import OptimConfig


def small_config() -> RunConfig:
    """16 experts, 8 sequences of 32 tokens per step, AdamW for dense matrices."""
    return RunConfig(
        recipe="small",
        model=ModelConfig(
            vocab_size=64,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            moe=MoEConfig(num_experts=16, top_k=2, expert_hidden_size=16),
            max_seq_len=64,
        ),
        data=DataConfig(seq_len=32, tokenizer=TokenizerConfig(vocab_size=64)),
        train=TrainConfig(steps=10, global_batch_tokens=256, microbatch_sequences=4),
        optim=OptimConfig(matrices="adamw"),
    )
