"""From a prepared corpus to batches: a pure function of seed and step.

Shape legend: B sequences, S tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from amalthea.core.errors import DataError
from amalthea.data.batch import Batch
from amalthea.data.config import DataConfig
from amalthea.data.hashing import key_of
from amalthea.data.order import SampleOrder, mixture_weights, window_of
from amalthea.data.packing import PackedDocuments, Windows
from amalthea.data.prepare import prepare
from amalthea.data.prepared import TOKENIZER_FILE, PreparedData, open_prepared
from amalthea.data.shards import Shard

__all__ = ["TOKENIZER_FILE", "PreparedData", "TrainData", "ValidationData", "open_prepared", "prepare"]


def mixture_of(prepared: PreparedData, config: DataConfig) -> dict[str, float]:
    """Each language's share of the samples.

    Raises DataError when the mixture names an unknown language, or the text is too short for one sequence.
    """
    tokens = {language: prepared.num_tokens(language) for language in prepared.languages}
    if sum(tokens.values()) < config.seq_len:
        raise DataError(
            f"the corpus has {sum(tokens.values())} training tokens, fewer than one sequence of "
            f"data.seq_len={config.seq_len}; bring more text or set a smaller data.seq_len"
        )
    return mixture_weights(tokens, temperature=config.temperature, fixed=config.weights)


class TrainData:
    """Training batches: a pure function of step and row, whatever the number of ranks."""

    def __init__(self, prepared: PreparedData, config: DataConfig, *, seed: int, global_batch_sequences: int) -> None:
        """Raises DataError as `mixture_of` does."""
        self.weights = mixture_of(prepared, config)
        self.global_batch_sequences = global_batch_sequences
        self._languages = tuple(self.weights)
        self._order = SampleOrder(tuple(self.weights.values()), seed)
        self._seed = seed
        self._seq_len = config.seq_len
        self._packed = [
            _pack(prepared.shard(language), config.seq_len, key_of("documents", seed, language))
            for language in self._languages
        ]

    def num_windows(self, language: str) -> int:
        """Sequences in one epoch of a language; 0 for one outside the mixture."""
        return self._packed[self._languages.index(language)].num_windows if language in self.weights else 0

    def batch(self, step: int, rows: range) -> Batch:
        """Rows of the global batch of optimizer step `step`, counted from 0."""
        samples = step * self.global_batch_sequences + np.asarray(rows, dtype=np.int64)
        languages, windows = self.locate(samples)
        parts = [
            (np.flatnonzero(languages == index), self._packed[index].windows(windows[languages == index]))
            for index in np.unique(languages)
        ]
        return _assemble(parts, [self._languages[index] for index in languages], self._seq_len)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Language (its index in `weights`) and window of samples, counted from the run's beginning."""
        languages, earlier = self._order.locate(samples)
        windows = np.empty_like(earlier)
        for index in np.unique(languages):
            here = languages == index
            windows[here] = window_of(
                earlier[here],
                num_windows=self._packed[index].num_windows,
                language=self._languages[index],
                seed=self._seed,
            )
        return languages, windows


class ValidationData:
    """Held-out sequences by language, the same for every seed."""

    def __init__(self, prepared: PreparedData, config: DataConfig) -> None:
        """At most `val_tokens_per_language` tokens of each language that has held-out documents."""
        self._eos_id = prepared.tokenizer.eos_id
        self._seq_len = config.seq_len
        self._packed: dict[str, PackedDocuments] = {}
        self._limits: dict[str, int] = {}
        for language in prepared.languages:
            limit = min(prepared.num_tokens(language, split="val"), config.val_tokens_per_language)
            if limit:
                shard = prepared.shard(language, split="val")
                self._packed[language] = _pack(shard, config.seq_len, key_of("held out", language))
                self._limits[language] = limit

    @property
    def languages(self) -> tuple[str, ...]:
        """Languages that have held-out text, sorted."""
        return tuple(self._packed)

    def num_sequences(self, language: str) -> int:
        return -(-self._limits.get(language, 0) // self._seq_len)

    def batch(self, language: str, rows: range) -> Batch:
        """Sequences of a language; the last one is filled up with a document of `<|eos|>` without labels."""
        indices = np.asarray(rows, dtype=np.int64)
        windows = self._packed[language].first_tokens(indices, limit=self._limits[language], padding=self._eos_id)
        return _assemble([(np.arange(len(indices)), windows)], [language] * len(indices), self._seq_len)


def _pack(shard: Shard, seq_len: int, key: int) -> PackedDocuments:
    return PackedDocuments(shard.tokens, shard.offsets, seq_len=seq_len, key=key)


def _assemble(parts: Sequence[tuple[np.ndarray, Windows]], languages: Sequence[str], seq_len: int) -> Batch:
    """A batch out of (its rows, their windows)."""
    tokens = np.empty((len(languages), seq_len), dtype=np.int64)
    labels = np.empty_like(tokens)
    lengths: list[tuple[int, ...]] = [()] * len(languages)
    for rows, windows in parts:
        tokens[rows], labels[rows] = windows.tokens, windows.labels
        for row, row_lengths in zip(rows, windows.document_lengths, strict=True):
            lengths[row] = row_lengths
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), tuple(lengths), tuple(languages))
