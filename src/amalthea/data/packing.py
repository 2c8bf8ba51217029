"""Documents laid end to end and cut into windows of the sequence length.

Shape legend: D documents, S tokens per sequence, N windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amalthea.data.batch import IGNORED
from amalthea.data.hashing import shuffled


@dataclass(frozen=True)
class Windows:
    """`tokens` and `labels` are int64 [N, S]; `document_lengths[n]` sum to S."""

    tokens: np.ndarray
    labels: np.ndarray
    document_lengths: tuple[tuple[int, ...], ...]


class PackedDocuments:
    """The documents of one language in an order of the key's, as a ring of tokens cut into windows.

    A window reads one token more than it holds, so that no label is lost at a cut. The last window of a ring
    goes on with the ring's beginning, so that no token is left out.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, *, seq_len: int, key: int) -> None:
        """`tokens` hold document d at offsets[d] … offsets[d + 1] - 1; they may lie in a mapped file.

        Memory: 16 bytes a document.
        """
        order = shuffled(len(offsets) - 1, key=key)
        self._tokens = tokens
        self._sources = offsets[:-1][order]
        ends = np.cumsum(np.diff(offsets)[order])
        self._starts = np.concatenate([[0], ends[:-1]])
        self.seq_len = seq_len
        self.num_tokens = int(ends[-1])

    @property
    def num_windows(self) -> int:
        return -(-self.num_tokens // self.seq_len)

    def windows(self, indices: np.ndarray) -> Windows:
        """The windows of these numbers, each below `num_windows`."""
        tokens, begins = self._read(indices)
        labels = np.where(begins[:, 1:], IGNORED, tokens[:, 1:])
        return _make(tokens[:, :-1], labels, begins[:, :-1])

    def first_tokens(self, indices: np.ndarray, *, limit: int, padding: int) -> Windows:
        """The windows of these numbers over the first `limit` tokens only.

        What lies behind is one document of `padding` whose labels are ignored.
        """
        tokens, begins = self._read(indices)
        labels = np.where(begins[:, 1:], IGNORED, tokens[:, 1:])
        positions = indices[:, None] * self.seq_len + np.arange(self.seq_len)
        behind = positions >= limit
        labels[behind] = IGNORED
        tokens, begins = tokens[:, :-1], begins[:, :-1]
        tokens[behind] = padding
        begins[behind] = False
        begins[positions == limit] = True
        return _make(tokens, labels, begins)

    def _read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [N, S + 1] and whether a document begins there."""
        positions = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        positions %= self.num_tokens
        documents = np.searchsorted(self._starts, positions, side="right") - 1
        inside = positions - self._starts[documents]
        return self._tokens[self._sources[documents] + inside].astype(np.int64), inside == 0


def _make(tokens: np.ndarray, labels: np.ndarray, begins: np.ndarray) -> Windows:
    lengths = []
    for row in begins:
        edges = np.flatnonzero(row[1:]) + 1
        lengths.append(tuple(np.diff(edges, prepend=0, append=len(row)).tolist()))
    return Windows(tokens, labels, tuple(lengths))
