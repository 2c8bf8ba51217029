"""Packing against a slow reference that walks token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from amalthea.data.batch import IGNORED
from amalthea.data.hashing import shuffled
from amalthea.data.packing import PackedDocuments, Windows

LENGTHS = st.lists(st.integers(2, 9), min_size=1, max_size=12)
SEQ_LENS = st.integers(1, 20)
KEY = 7
PADDING = -1


def _documents(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that are all different, so that each tells where it came from."""
    return np.arange(100, 100 + sum(lengths), dtype="<u2"), np.cumsum([0, *lengths])


def _ring(lengths: list[int]) -> list[tuple[int, bool]]:
    """(token, whether it is its document's last) in packed order, one token after the other."""
    tokens, offsets = _documents(lengths)
    ring = []
    for document in shuffled(len(lengths), key=KEY):
        for place in range(offsets[document], offsets[document + 1]):
            ring.append((int(tokens[place]), place == offsets[document + 1] - 1))
    return ring


def _reference(ring: list[tuple[int, bool]], window: int, seq_len: int) -> tuple[list[int], list[int], tuple[int, ...]]:
    tokens, labels, lengths = [], [], [0]
    for position in range(window * seq_len, (window + 1) * seq_len):
        token, last = ring[position % len(ring)]
        tokens.append(token)
        labels.append(IGNORED if last else ring[(position + 1) % len(ring)][0])
        lengths[-1] += 1
        if last:
            lengths.append(0)
    return tokens, labels, tuple(length for length in lengths if length)


def _row(windows: Windows, row: int) -> tuple[list[int], list[int], tuple[int, ...]]:
    return windows.tokens[row].tolist(), windows.labels[row].tolist(), windows.document_lengths[row]


@given(LENGTHS, SEQ_LENS)
def test_windows_equal_the_reference(lengths: list[int], seq_len: int) -> None:
    packed = PackedDocuments(*_documents(lengths), seq_len=seq_len, key=KEY)
    ring = _ring(lengths)
    order = np.arange(packed.num_windows)[::-1]
    windows = packed.windows(order)
    assert windows.tokens.dtype == windows.labels.dtype == np.int64
    for row, window in enumerate(order):
        assert _row(windows, row) == _reference(ring, int(window), seq_len)
        assert sum(windows.document_lengths[row]) == seq_len


@given(LENGTHS, SEQ_LENS)
def test_no_token_and_no_label_is_lost(lengths: list[int], seq_len: int) -> None:
    packed = PackedDocuments(*_documents(lengths), seq_len=seq_len, key=KEY)
    windows = packed.windows(np.arange(packed.num_windows))
    total = sum(lengths)
    assert packed.num_windows == -(-total // seq_len)
    tokens, labels = windows.tokens.reshape(-1), windows.labels.reshape(-1)
    assert sorted(tokens[:total].tolist()) == list(range(100, 100 + total))
    # Every token but the first of its document is a label once.
    assert (labels[:total] != IGNORED).sum() == total - len(lengths)


@given(LENGTHS, SEQ_LENS, st.data())
def test_first_tokens_end_in_a_document_of_padding(lengths: list[int], seq_len: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, sum(lengths)))
    packed = PackedDocuments(*_documents(lengths), seq_len=seq_len, key=KEY)
    num_windows = -(-limit // seq_len)
    windows = packed.first_tokens(np.arange(num_windows), limit=limit, padding=PADDING)
    ring = _ring(lengths)
    for row in range(num_windows):
        tokens, labels, document_lengths = _reference(ring, row, seq_len)
        inside = min(seq_len, limit - row * seq_len)
        assert windows.tokens[row].tolist() == tokens[:inside] + [PADDING] * (seq_len - inside)
        assert windows.labels[row].tolist() == labels[:inside] + [IGNORED] * (seq_len - inside)
        assert sum(windows.document_lengths[row]) == seq_len
        if inside < seq_len:
            assert windows.document_lengths[row][-1] == seq_len - inside
        else:
            assert windows.document_lengths[row] == document_lengths


def test_key_orders_the_documents() -> None:
    lengths = [3] * 30
    first, second = (
        PackedDocuments(*_documents(lengths), seq_len=90, key=key).windows(np.array([0])).tokens for key in (1, 2)
    )
    assert not np.array_equal(first, second)
    assert np.array_equal(np.sort(first), np.sort(second))
