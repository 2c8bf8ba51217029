"""The recipe for one node of eight GPUs."""

from __future__ import annotations

from amalthea.checkpoint.config import CheckpointConfig
from amalthea.config.run import RunConfig, TrainConfig
from amalthea.data.config import DataConfig, TokenizerConfig
from amalthea.memory.config import MemoryConfig
from amalthea.model.config import ModelConfig, MoEConfig
from amalthea.optim.config import AdamWConfig, MuonConfig, OptimConfig, ScheduleConfig
from amalthea.parallel.config import ParallelConfig


def moe_small() -> RunConfig:
    """One node of eight GPUs: 7.0 B parameters, 1.1 B active per token.

    Parameters, with D 2048, 16 layers, 16 query and 4 KV heads of 128, 64 experts of F 1024, vocabulary 65,536:

    | part | each | in all |
    |---|---|---|
    | one expert | 3·D·F = 6.291 M | 64 + 1 shared, 16 layers: 6.543 B; visited, 6 + 1: 0.705 B |
    | attention | D·128·(2·16 + 2·4) = 10.49 M | 0.168 B |
    | router and norms | 64·D, 2·D + 2·128 | 0.002 B |
    | embedding and head | 65,536·D = 134.2 M | 0.268 B |
    | all | | 6.981 B; active 1.143 B, 1.009 B without the input embedding |

    Eight ranks hold eight whole experts each. In fp32, weights, gradients and optimizer state are 12 bytes per
    parameter for Muon (hidden matrices: 6.71 B) and 16 for AdamW (the rest: 0.27 B), so 10.6 GB per GPU. A step
    is 2^20 tokens. Set `data.path` to a corpus of some 10 B tokens or more: the demo corpus is far too small for
    this model. Learning rates and rope_theta are our choice.
    """
    vocab_size, seq_len = 65_536, 4096
    return RunConfig(
        recipe="moe-small",
        precision="bf16",
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=2048,
            num_layers=16,
            num_heads=16,
            num_kv_heads=4,
            head_dim=128,
            moe=MoEConfig(num_experts=64, top_k=6, expert_hidden_size=1024, num_shared_experts=1),
            max_seq_len=seq_len,
        ),
        data=DataConfig(
            seq_len=seq_len,
            tokenizer=TokenizerConfig(vocab_size=vocab_size),
            val_tokens_per_language=65_536,
        ),
        train=TrainConfig(steps=20_000, global_batch_tokens=2**20, microbatch_sequences=4, validate_every_steps=500),
        parallel=ParallelConfig(ep=8),
        memory=MemoryConfig(recompute="block"),
        optim=OptimConfig(
            experts="muon",
            matrices="muon",
            adamw=AdamWConfig(lr=4e-4),
            muon=MuonConfig(lr=4e-4),
            schedule=ScheduleConfig(kind="wsd", warmup_steps=500),
        ),
        checkpoint=CheckpointConfig(every_steps=500),
    )
