"""Which documents are trained on, held out, left out, and shown to the tokenizer's trainer.

Every choice is a threshold on a hash of the document's text, so it is the same in whatever order, and in
whichever files, the documents come. Equal texts share their fate.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from amalthea.data.corpus import Document
from amalthea.data.hashing import key_of, text_hashes

Split = Literal["train", "val"]

_ALL = 1 << 64
_SAMPLE_CHARACTERS_PER_TOKEN = 400
_MAX_SAMPLE_REPEATS = 4


@dataclass
class _Seen:
    """Hashes and sizes of one language's documents."""

    split: array[int] = field(default_factory=lambda: array("Q"))
    rank: array[int] = field(default_factory=lambda: array("Q"))
    num_bytes: array[int] = field(default_factory=lambda: array("Q"))
    characters: array[int] = field(default_factory=lambda: array("Q"))


@dataclass(frozen=True)
class _Choice:
    """Thresholds of one language."""

    kept_up_to: int
    held_out_below: int
    sample_up_to: int
    sample_repeats: int


@dataclass(frozen=True)
class DocumentSplit:
    """The choice for every document of a corpus of `num_bytes`, as `survey` found it."""

    choices: dict[str, _Choice]
    num_bytes: int
    seed: int

    def of(self, document: Document) -> Split | None:
        """`train`, `val`, or none for one that is left out."""
        return self._decide(document)[0]

    def tokenizer_sample(self, documents: Iterable[Document]) -> Iterator[str]:
        """Training texts with about as many characters of each language; small languages are repeated."""
        key = _sample_key(self.seed)
        for document in documents:
            split, rank = self._decide(document)
            choice = self.choices[document.language]
            if split == "train" and rank ^ key <= choice.sample_up_to:
                yield from [document.text] * choice.sample_repeats

    def _decide(self, document: Document) -> tuple[Split | None, int]:
        split_hash, rank = text_hashes(document.data)
        choice = self.choices[document.language]
        if rank > choice.kept_up_to:
            return None, rank
        return ("val" if split_hash < choice.held_out_below else "train"), rank


def survey(
    documents: Iterable[Document],
    *,
    val_fraction: float,
    max_bytes_per_language: int | None,
    vocab_size: int,
    seed: int,
) -> DocumentSplit:
    """Decide for every document after one pass over all of them.

    About `val_fraction` of a language's documents are held out; with two different documents or more, at least
    one is and one is not. Beyond `max_bytes_per_language` documents are left out. The tokenizer's sample grows
    with `vocab_size`; `seed` picks its documents.

    Memory: 32 bytes a document.
    """
    seen: dict[str, _Seen] = defaultdict(_Seen)
    for document in documents:
        split_hash, rank = text_hashes(document.data)
        entry = seen[document.language]
        entry.split.append(split_hash)
        entry.rank.append(rank)
        entry.num_bytes.append(len(document.data))
        entry.characters.append(len(document.text))
    sample_characters = _SAMPLE_CHARACTERS_PER_TOKEN * vocab_size // max(1, len(seen))
    choices = {
        language: _choose(entry, val_fraction, max_bytes_per_language, sample_characters, seed)
        for language, entry in sorted(seen.items())
    }
    num_bytes = sum(sum(entry.num_bytes) for entry in seen.values())
    return DocumentSplit(choices=choices, num_bytes=num_bytes, seed=seed)


def _choose(entry: _Seen, val_fraction: float, max_bytes: int | None, sample_characters: int, seed: int) -> _Choice:
    split, rank, num_bytes, characters = (
        np.frombuffer(values, dtype=np.uint64)
        for values in (entry.split, entry.rank, entry.num_bytes, entry.characters)
    )
    kept_up_to = _ALL - 1 if max_bytes is None else _largest_within(rank, num_bytes, max_bytes)
    kept = rank <= np.uint64(kept_up_to)
    held_out_below = _held_out_below(split[kept], val_fraction)
    train = kept & (split >= np.uint64(held_out_below))
    sample_up_to = _largest_within(rank[train] ^ np.uint64(_sample_key(seed)), characters[train], sample_characters)
    available = int(characters[train].sum())
    repeats = max(1, min(_MAX_SAMPLE_REPEATS, round(sample_characters / max(1, available))))
    return _Choice(kept_up_to, held_out_below, sample_up_to, repeats)


def _largest_within(ranks: np.ndarray, sizes: np.ndarray, limit: int) -> int:
    """The rank up to which documents are taken: until their sizes reach the limit, but one at least."""
    order = np.argsort(ranks, kind="stable")
    before = np.cumsum(sizes[order]) - sizes[order]
    return int(ranks[order][before < max(1, limit)][-1])


def _held_out_below(hashes: np.ndarray, fraction: float) -> int:
    different = np.unique(hashes)
    if len(different) == 1:
        return 0
    threshold = int(fraction * _ALL)
    # At least the smallest below, at least the largest not.
    return min(max(threshold, int(different[0]) + 1), int(different[-1]))


def _sample_key(seed: int) -> int:
    return key_of("tokenizer sample", seed)
