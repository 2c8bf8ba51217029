"""The recipe that runs anywhere."""

from __future__ import annotations

from amalthea.checkpoint.config import CheckpointConfig
from amalthea.config.run import RunConfig, TrainConfig
from amalthea.data.config import DataConfig, TokenizerConfig
from amalthea.model.config import ModelConfig, MoEConfig
from amalthea.optim.config import AdamWConfig, MuonConfig, OptimConfig, ScheduleConfig


def quickstart() -> RunConfig:
    """24 languages on two CPU cores, in about two minutes of training.

    A whole run in small: text of every language, a tokenizer of its own, 16 experts per layer. Learning
    rates are our choice, for a model of this size.
    """
    vocab_size = 8192
    return RunConfig(
        recipe="quickstart",
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=192,
            num_layers=4,
            num_heads=6,
            num_kv_heads=2,
            head_dim=32,
            moe=MoEConfig(num_experts=16, top_k=2, expert_hidden_size=128, num_shared_experts=1, bias_update_rate=1e-2),
            max_seq_len=1024,
        ),
        data=DataConfig(
            seq_len=256,
            tokenizer=TokenizerConfig(vocab_size=vocab_size),
            val_tokens_per_language=1024,
        ),
        train=TrainConfig(steps=200, global_batch_tokens=2048, microbatch_sequences=8, validate_every_steps=100),
        optim=OptimConfig(
            experts="muon",
            matrices="muon",
            adamw=AdamWConfig(lr=1e-2),
            muon=MuonConfig(lr=3e-3, products="fp32"),
            schedule=ScheduleConfig(kind="wsd", warmup_steps=20, decay_fraction=0.4),
        ),
        checkpoint=CheckpointConfig(every_steps=100),
    )
