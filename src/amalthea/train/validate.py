"""Held-out text, language by language, in bits per byte.

Shape legend: B sequences, S tokens per sequence, G languages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import torch
import torch.distributed as dist

from amalthea.data.batch import IGNORED, Batch
from amalthea.train.build import Run
from amalthea.train.records import ValidationRecord
from amalthea.train.step import forward, positions


class HeldOut(Protocol):
    """What validation needs of `data.dataset.ValidationData`."""

    @property
    def languages(self) -> tuple[str, ...]: ...
    def num_sequences(self, language: str) -> int: ...
    def batch(self, language: str, rows: range) -> Batch: ...


@torch.no_grad()
def validate(
    run: Run, held_out: HeldOut, *, token_bytes: torch.Tensor, step: int, progress: Callable[[str], None]
) -> ValidationRecord:
    """Scores every held-out sequence once, spread over all ranks.

    `token_bytes` int [V]: UTF-8 bytes of each token; special tokens have none and count neither way. Bits per byte
    compare models of any tokenizer. Communication: the model's own and one all-reduce at the end.
    """
    start = perf_counter()
    items = [(language, row) for language in held_out.languages for row in range(held_out.num_sequences(language))]
    share = items[run.mesh.data_rank :: run.mesh.data_ranks]
    # Every rank must run as many passes over as many rows as the busiest one, since their collectives meet.
    most = -(-len(items) // run.mesh.data_ranks)
    size = run.resolved.gather_sequences
    index = {language: i for i, language in enumerate(held_out.languages)}
    sums = torch.zeros(4, len(index), dtype=torch.float64, device=run.device)
    token_bytes = token_bytes.to(run.device)
    for begin in range(0, most, size):
        progress(f"validating {min(begin + size, most)}/{most}")
        part = share[begin : begin + size]
        padded = part + items[:1] * (min(size, most - begin) - len(part))
        batch = _join([held_out.batch(language, range(row, row + 1)) for language, row in padded])
        losses = forward(run, batch, per_token=True).result.double()
        if part:
            rows = torch.tensor([index[language] for language, _ in part], device=run.device)
            scores = _score(losses, positions(run, batch.labels).to(run.device), token_bytes)
            sums.index_add_(1, rows, scores[:, : len(part)])
    dist.all_reduce(sums)
    return _record(held_out.languages, sums.tolist(), step=step, seconds=perf_counter() - start)


def _join(batches: list[Batch]) -> Batch:
    return Batch(
        tokens=torch.cat([b.tokens for b in batches]),
        labels=torch.cat([b.labels for b in batches]),
        document_lengths=tuple(lengths for b in batches for lengths in b.document_lengths),
        languages=tuple(language for b in batches for language in b.languages),
    )


def _score(losses: torch.Tensor, labels: torch.Tensor, token_bytes: torch.Tensor) -> torch.Tensor:
    """Per sequence: nats on text, bytes of text, nats on all labels, labels. Shapes [B, S] → [4, B]."""
    kept = labels != IGNORED
    num_bytes = token_bytes[labels.where(kept, 0)] * kept
    return torch.stack(
        ((losses * (num_bytes > 0)).sum(-1), num_bytes.sum(-1).double(), (losses * kept).sum(-1), kept.sum(-1).double())
    )


def _record(languages: tuple[str, ...], sums: list[list[float]], *, step: int, seconds: float) -> ValidationRecord:
    text_nats, text_bytes, nats, labels = sums
    bits = {
        language: n / (math.log(2) * b) for language, n, b in zip(languages, text_nats, text_bytes, strict=True) if b
    }
    return ValidationRecord(
        step=step,
        loss=sum(nats) / max(1.0, sum(labels)),
        bits_per_byte=bits,
        mean_bits_per_byte=sum(bits.values()) / max(1, len(bits)),
        seconds=seconds,
        tokens=int(sum(labels)),
    )
