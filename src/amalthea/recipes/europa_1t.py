"""The reference model of a trillion parameters."""

from __future__ import annotations

from amalthea.checkpoint.config import CheckpointConfig
from amalthea.config.run import RunConfig, TrainConfig
from amalthea.data.config import DataConfig, TokenizerConfig
from amalthea.memory.config import MemoryConfig
from amalthea.model.config import ModelConfig, MoEConfig
from amalthea.optim.config import AdamWConfig, MuonConfig, OptimConfig, ScheduleConfig
from amalthea.parallel.config import ParallelConfig


def europa_1t() -> RunConfig:
    """The reference model: 951.9 B parameters, 32.8 B active, four replicas of 384 GPUs.

    Published of the EUROPA run (PyTorch blog, 2026-11-12): 74 layers of hidden size 6144, 384 experts of which a
    token visits 8, 65,536 tokens per sequence, Muon for matrices and AdamW for the rest, 1,536 GH200 as four
    replicas. From the totals follows the experts' hidden size, 1792. The rest is one of the shapes that fit
    them: GQA with 48 query and 16 KV heads of 128, one shared expert, vocabulary 262,144, untied.

    Our choice: rope_theta, learning rates, schedule, number of steps, one sequence per GPU and step, and the
    expert-parallel degree 4, the GPUs of a node.
    """
    vocab_size, seq_len = 262_144, 65_536
    num_replicas, gpus_per_replica = 4, 384
    return RunConfig(
        recipe="europa-1t",
        precision="bf16",
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=6144,
            num_layers=74,
            num_heads=48,
            num_kv_heads=16,
            head_dim=128,
            moe=MoEConfig(num_experts=384, top_k=8, expert_hidden_size=1792, num_shared_experts=1),
            rope_theta=1_000_000.0,
            max_seq_len=seq_len,
        ),
        data=DataConfig(
            seq_len=seq_len,
            tokenizer=TokenizerConfig(vocab_size=vocab_size),
            val_tokens_per_language=1_048_576,
        ),
        train=TrainConfig(
            steps=100_000,
            global_batch_tokens=num_replicas * gpus_per_replica * seq_len,
            microbatch_sequences=1,
            validate_every_steps=1000,
        ),
        parallel=ParallelConfig(dp_replicate=num_replicas, ep=4),
        memory=MemoryConfig(recompute="block", offload=True, unshard_async_op=True),
        optim=OptimConfig(
            experts="muon",
            matrices="muon",
            adamw=AdamWConfig(lr=2e-4),
            muon=MuonConfig(lr=2e-4),
            schedule=ScheduleConfig(kind="wsd", warmup_steps=2000),
        ),
        checkpoint=CheckpointConfig(every_steps=100),
    )
