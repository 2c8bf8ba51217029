"""The two sides of the comparison: our training step and Hugging Face's, on one shape, batch and set of weights.

Each side is a function that takes the number of a step and returns (loss, gradient norm). Both train all parameters
by `torch.optim.AdamW(fused=True)` with the same two groups and clip gradients to norm 1. Neither recomputes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import Glm4MoeForCausalLM

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.libc import keep_freed_memory
from amalthea.core.world import World
from amalthea.data.batch import IGNORED, Batch
from amalthea.interop.glm4_moe import to_hf_config, to_hf_state
from amalthea.model.config import ModelConfig, MoEConfig
from amalthea.model.init import initialize
from amalthea.model.transformer import Transformer
from amalthea.train.build import build
from amalthea.train.step import train_step

Step = Callable[[int], tuple[float, float]]

SEED = 0
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Size:
    """A model, and the batch of one step: `sequences` of `seq_len` tokens."""

    name: str
    model: ModelConfig
    seq_len: int
    sequences: int
    steps_per_turn: int
    """Steps timed together, so that a turn lasts a second or more."""

    @property
    def tokens(self) -> int:
        return self.seq_len * self.sequences


def _model(
    vocab: int, hidden: int, layers: int, heads: tuple[int, int, int], experts: tuple[int, int, int]
) -> ModelConfig:
    """`heads`: query heads, key/value heads, head dim; `experts`: how many, chosen, hidden size; one shared."""
    num_experts, top_k, expert_hidden = experts
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        max_seq_len=1024,
        # Hugging Face's class does not balance: without it, both sides route alike at every step.
        moe=MoEConfig(num_experts=num_experts, top_k=top_k, expert_hidden_size=expert_hidden, bias_update_rate=0.0),
    )


SIZES = {
    size.name: size
    for size in (
        Size("tiny", _model(256, 64, 2, (4, 2, 16), (4, 2, 32)), seq_len=64, sequences=2, steps_per_turn=2),
        Size("quickstart", _model(8192, 192, 4, (6, 2, 32), (16, 2, 128)), 256, 16, steps_per_turn=4),
        Size("middle", _model(16384, 512, 8, (8, 2, 64), (32, 4, 256)), 512, 4, steps_per_turn=2),
        Size("large", _model(32768, 1024, 6, (16, 4, 64), (32, 4, 512)), 1024, 2, steps_per_turn=1),
    )
}


def make_batch(size: Size, *, packed: bool, step: int) -> Batch:
    """Random tokens, a pure function of the step; with `packed` several documents of uneven lengths in a sequence."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(size.model.vocab_size, (size.sequences, size.seq_len), generator=generator)
    labels = tokens.roll(-1, dims=1)
    lengths = []
    for row in range(size.sequences):
        cuts = torch.randperm(size.seq_len - 1, generator=generator)[:3].add(1).sort().values if packed else []
        edges = [0, *map(int, cuts), size.seq_len]
        lengths.append(tuple(end - start for start, end in itertools.pairwise(edges)))
        labels[row, torch.tensor(edges[1:]) - 1] = IGNORED
    return Batch(tokens, labels, tuple(lengths), ("xx",) * size.sequences)


def ours(size: Size, *, packed: bool) -> Step:
    """`train_step` as `amalthea train` runs it in one process."""
    keep_freed_memory()
    config = _run_config(size)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = build(config, resolve(config, world_size=1), World())

    def step(number: int) -> tuple[float, float]:
        result = train_step(run, [make_batch(size, packed=packed, step=number)], lr_factor=1.0, tallies=())
        return result.loss, result.grad_norm

    return step


def hugging_face(size: Size, *, packed: bool, experts: str, attention: str, keeps_memory: bool = False) -> Step:
    """The plain loop of a careful user of `Glm4MoeForCausalLM`; the class computes its own loss from labels.

    `keeps_memory` gives it the allocator setting that our launcher makes, which is none of Hugging Face's.
    """
    if keeps_memory:
        keep_freed_memory()
    model = _hf_model(size.model, experts=experts, attention=attention)
    adamw = _run_config(size).optim.adamw
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": adamw.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=adamw.lr,
        betas=(adamw.beta1, adamw.beta2),
        eps=adamw.eps,
        fused=True,
    )

    def step(number: int) -> tuple[float, float]:
        batch = make_batch(size, packed=packed, step=number)
        inputs = _hf_inputs(batch, packed=packed)
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    return step


def gathered_bytes(size: Size) -> int:
    """What `batched_mm` keeps for backward: a copy of its expert's weights for every token and choice."""
    moe = size.model.moe
    per_slot = 3 * size.model.hidden_size * moe.expert_hidden_size * 4
    return size.tokens * moe.top_k * per_slot * size.model.num_layers


def _run_config(size: Size) -> RunConfig:
    values: dict[str, Any] = {
        "recipe": "train-step-benchmark",
        "seed": SEED,
        "device": "cpu",
        "model": size.model.model_dump(),
        "data": {
            "path": "unused",
            "seq_len": size.seq_len,
            "tokenizer": {"vocab_size": size.model.vocab_size},
        },
        "train": {
            "steps": 1,
            "global_batch_tokens": size.tokens,
            "microbatch_sequences": size.sequences,
            "max_grad_norm": MAX_GRAD_NORM,
        },
        "optim": {"experts": "adamw", "matrices": "adamw"},
    }
    return RunConfig.model_validate(values)


def _hf_model(config: ModelConfig, *, experts: str, attention: str) -> Glm4MoeForCausalLM:
    """Hugging Face's model with the weights that ours starts from."""
    hf_config = to_hf_config(config)
    hf_config._attn_implementation, hf_config._experts_implementation = attention, experts
    model = Transformer(config)
    initialize(model, seed=SEED)
    hf_model = Glm4MoeForCausalLM(hf_config)
    hf_model.load_state_dict(to_hf_state(model.state_dict(), config))
    return hf_model.train()


def _hf_inputs(batch: Batch, *, packed: bool) -> dict[str, torch.Tensor]:
    """Labels are the tokens, which the class shifts; positions that start again tell it where documents begin."""
    if not packed:
        return {"input_ids": batch.tokens, "labels": batch.tokens}
    labels = batch.tokens.clone()
    positions = torch.empty_like(batch.tokens)
    for row, lengths in enumerate(batch.document_lengths):
        positions[row] = torch.cat([torch.arange(length) for length in lengths])
    labels[positions == 0] = IGNORED
    return {"input_ids": batch.tokens, "labels": labels, "position_ids": positions}
