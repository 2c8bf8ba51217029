"""Models of others' published runs, as far as this model family covers them: by arithmetic from their public shapes.

What differs is said with each. Where attention is of another kind, heads are chosen so that its parameters agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from amalthea.config.run import RunConfig, TrainConfig
from amalthea.data.config import DataConfig, TokenizerConfig
from amalthea.memory.config import MemoryConfig
from amalthea.model.config import ModelConfig, MoEConfig
from amalthea.optim.config import OptimConfig
from amalthea.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Peer:
    """A published row (FACTS §6) and the run that stands for it. `published` is in tokens/s or TFLOP/s per GPU."""

    name: str
    system: str
    cluster: str
    num_gpus: int
    published: float
    unit: str
    config: RunConfig
    differences: tuple[str, ...]
    calibrates: bool = False


_OPTIMIZER = OptimConfig(experts="adamw", matrices="adamw")
_LAYOUT = "their layout is not in our source: expert parallelism over nodes, FSDP for the rest, no pipeline"
_BALANCED = "experts perfectly balanced, as in forced-balanced gates"
"""Shared by all rows."""


def _run(
    name: str,
    model: ModelConfig,
    *,
    num_gpus: int,
    ep: int,
    sequences_per_rank: int,
    memory: MemoryConfig,
) -> RunConfig:
    return RunConfig(
        recipe=name,
        precision="bf16",
        model=model,
        data=DataConfig(seq_len=4096, tokenizer=TokenizerConfig(vocab_size=model.vocab_size)),
        train=TrainConfig(steps=1000, global_batch_tokens=num_gpus * sequences_per_rank * 4096, microbatch_sequences=4),
        parallel=ParallelConfig.model_validate({"ep": ep, "ranks_per_node": 8, "reduce_dtype": "bf16"}),
        memory=memory,
        optim=_OPTIMIZER,
    )


def deepseek_v3_model() -> ModelConfig:
    """671 B parameters, 37.6 B active: GQA 96/6×128 has the parameters of its MLA (187.2 of 187.1 M a layer)."""
    return ModelConfig(
        vocab_size=129_280,
        hidden_size=7168,
        num_layers=61,
        num_heads=96,
        num_kv_heads=6,
        head_dim=128,
        num_dense_layers=3,
        dense_hidden_size=18_432,
        qk_norm=False,
        moe=MoEConfig(num_experts=256, top_k=8, expert_hidden_size=2048, num_shared_experts=1),
    )


def qwen3_235b_model() -> ModelConfig:
    """235 B parameters, 22 B active."""
    return ModelConfig(
        vocab_size=151_936,
        hidden_size=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        moe=MoEConfig(num_experts=128, top_k=8, expert_hidden_size=1536, num_shared_experts=0),
    )


def qwen3_30b_model() -> ModelConfig:
    """30.5 B parameters, 3.3 B active."""
    return ModelConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        moe=MoEConfig(num_experts=128, top_k=8, expert_hidden_size=768, num_shared_experts=0),
    )


def peers() -> tuple[Peer, ...]:
    """The rows that the family covers; Kimi K2 has DeepSeek's shape with other numbers that our source lacks."""
    block = MemoryConfig(recompute="block", unshard_async_op=True, sequences_per_gather=2)
    offloaded = block.model_copy(update={"offload": True})
    mla = "MLA stands as GQA of as many parameters; its scores cost about 1.7 times ours, little at 4,096 tokens"
    mtp = "without the multi-token head"
    deepseek = deepseek_v3_model()
    return (
        Peer(
            "DeepSeek-V3, 256 H100, bf16",
            "NeMo Automodel",
            "h100-sxm",
            256,
            1002,
            "tokens/s/GPU",
            _run("deepseek-v3", deepseek, num_gpus=256, ep=64, sequences_per_rank=8, memory=offloaded),
            (mla, mtp, _LAYOUT, _BALANCED),
            calibrates=True,
        ),
        Peer(
            "DeepSeek-V3, 1,024 H100, bf16",
            "NeMo Automodel",
            "h100-sxm",
            1024,
            865,
            "tokens/s/GPU",
            _run("deepseek-v3", deepseek, num_gpus=1024, ep=64, sequences_per_rank=8, memory=offloaded),
            (mla, mtp, _LAYOUT, _BALANCED),
        ),
        Peer(
            "Qwen3-30B-A3B, 16 H100, bf16",
            "Megatron-Core",
            "h100-sxm",
            16,
            244,
            "TFLOP/s/GPU",
            _run("qwen3-30b", qwen3_30b_model(), num_gpus=16, ep=8, sequences_per_rank=8, memory=block),
            ("244 without and 287 with overlapped dispatch; ours is not overlapped", _LAYOUT, _BALANCED),
        ),
        Peer(
            "Qwen3-235B-A22B, 256 H100, fp8",
            "Megatron-Core",
            "h100-sxm",
            256,
            1712,
            "tokens/s/GPU",
            _run("qwen3-235b", qwen3_235b_model(), num_gpus=256, ep=32, sequences_per_rank=8, memory=block),
            ("theirs multiplies in fp8, ours in bf16, which is up to twice as slow", _LAYOUT, _BALANCED),
        ),
    )
