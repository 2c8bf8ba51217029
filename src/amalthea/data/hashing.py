"""Pure random numbers: every shuffle here is a function of its key, and can be asked for any element alone."""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6


def key_of(*parts: str | int) -> int:
    """A 64-bit key for strings and numbers."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def text_hashes(data: bytes) -> tuple[int, int]:
    """Two independent 64-bit hashes of a document's text."""
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def mix(values: np.ndarray, *, key: int) -> np.ndarray:
    """uint64 values scattered over all 64 bits, another way for each key.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    mixed = (values.astype(np.uint64) + np.uint64(1)) * _GOLDEN ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def shuffled(size: int, *, key: int) -> np.ndarray:
    """0 … size - 1 in an order of the key's; int64 [size]."""
    return np.argsort(mix(np.arange(size), key=key), kind="stable")


def permute(index: np.ndarray, *, size: int, key: int) -> np.ndarray:
    """Where a permutation of 0 … size - 1 takes each `index`, without laying the permutation out; int64.

    A Feistel network over the next power of four; what falls outside walks on until it falls inside, fewer
    than four steps on average.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [key_of(key, number) for number in range(_ROUNDS)]
    result = index.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right, key=round_key) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)
