"""A model small enough for tests, its batches, and a run of a few steps on any mesh."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amalthea.checkpoint import store
from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.world import World
from amalthea.data.batch import IGNORED, Batch
from amalthea.train.build import Run, build
from amalthea.train.step import train_step

SEQ_LEN = 32
SEQUENCES = 8


def tiny_config(**overrides: Any) -> RunConfig:
    """Eight experts, two layers, 8 sequences of 32 tokens a step; overrides are `a__b=c`."""
    values: dict[str, Any] = {
        "recipe": "tiny",
        "seed": 7,
        "device": "cpu",
        "model": {
            "vocab_size": 96,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "max_seq_len": SEQ_LEN,
            "moe": {"num_experts": 8, "top_k": 2, "expert_hidden_size": 16},
            "init_std": 0.1,
            "loss_chunk_tokens": 24,
        },
        "data": {"path": "unused", "seq_len": SEQ_LEN, "tokenizer": {"vocab_size": 96}},
        "train": {"steps": 20, "global_batch_tokens": SEQ_LEN * SEQUENCES, "microbatch_sequences": SEQUENCES},
        "optim": {"matrices": "adamw", "experts": "adamw", "adamw": {"lr": 1e-3}, "muon": {"lr": 1e-3}},
    }
    for key, value in overrides.items():
        node = values
        *path, last = key.split("__")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return RunConfig.model_validate(values)


def tiny_batch(step: int, rows: range, *, vocab_size: int = 96, seq_len: int = SEQ_LEN) -> Batch:
    """Rows of a made-up global batch, several documents in each; a pure function of step and row."""
    tokens, labels, lengths = [], [], []
    for row in rows:
        generator = torch.Generator().manual_seed(1000 * step + row)
        stream = torch.randint(vocab_size, (seq_len + 1,), generator=generator)
        cut = int(torch.randint(1, seq_len, (), generator=generator))
        row_labels = stream[1:].clone()
        row_labels[cut - 1] = IGNORED
        # Neighbouring rows carry unlike numbers of labels, so that a mean of means is seen to be another one.
        row_labels[: 4 * (row % 4)] = IGNORED
        tokens.append(stream[:-1])
        labels.append(row_labels)
        lengths.append((cut, seq_len - cut))
    return Batch(torch.stack(tokens), torch.stack(labels), tuple(lengths), ("xx",) * len(tokens))


@dataclass(frozen=True)
class Curve:
    """What a run of a few steps shows."""

    losses: list[float]
    grad_norms: list[float]
    counts: list[tuple[tuple[int, ...], ...]]
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """Whole parameters and load-balance biases after the last step."""


def microbatches(run: Run, step: int) -> list[Batch]:
    """This rank's share of `tiny_batch`."""
    resolved = run.resolved
    first, size = run.mesh.data_rank * resolved.sequences_per_rank, resolved.gather_sequences
    vocab_size = run.config.model.vocab_size
    return [
        tiny_batch(step, range(first + i * size, first + (i + 1) * size), vocab_size=vocab_size)
        for i in range(resolved.accumulation_steps)
    ]


def whole_state(run: Run) -> dict[str, torch.Tensor]:
    """Parameters and biases, gathered; every rank calls it."""
    state = run.model.state_dict()
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in state.items()}


def run_steps(world: World, config: RunConfig, num_steps: int) -> Curve:
    """Trains on `tiny_batch` and returns what it showed; the same on every rank."""
    run = build(config, resolve(config, world_size=world.size), world)
    results = [train_step(run, microbatches(run, step), lr_factor=1.0, tallies=()) for step in range(num_steps)]
    return Curve(
        [r.loss for r in results], [r.grad_norm for r in results], [r.expert_counts for r in results], whole_state(run)
    )


Outcome = tuple[list[float], dict[str, torch.Tensor]]
"""Gradient norms of steps, and all that a checkpoint holds, whole."""


def steps(run: Run, numbers: range) -> list[float]:
    return [train_step(run, microbatches(run, step), lr_factor=1.0, tallies=()).grad_norm for step in numbers]


def resumed(world: World, folder: str, before: RunConfig, after: RunConfig) -> Outcome:
    """Two steps, a save, and in a new run of another configuration two more."""
    run = build(before, resolve(before, world_size=world.size), world)
    norms = steps(run, range(2))
    path = store.save(Path(folder), step=2, tensors=run.named_tensors(), progress={}, world=world, keep=1)
    run = build(after, resolve(after, world_size=world.size), world)
    store.load(path, run.named_tensors())
    return norms + steps(run, range(2, 4)), whole_state(run)


def uninterrupted(world: World, config: RunConfig) -> Outcome:
    """Four steps at once."""
    run = build(config, resolve(config, world_size=world.size), world)
    return steps(run, range(4)), whole_state(run)


def same(left: Outcome, right: Outcome) -> bool:
    """Bit for bit."""
    return left[0] == right[0] and all(torch.equal(left[1][name], right[1][name]) for name in right[1])
