"""Which window of which language is the g-th sample: a pure function of seed and g.

Nothing here knows of ranks or steps. Languages are interleaved in their exact proportions, shuffled inside
blocks of 256 samples; each language's windows are all taken once, in an order of their own, before any is taken
again.

Shape legend: L languages, N samples asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from amalthea.core.errors import DataError
from amalthea.data.hashing import key_of, mix, permute

BLOCK_SAMPLES = 256


def mixture_weights(
    tokens: Mapping[str, int], *, temperature: float, fixed: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Each language's share of the samples, summing to 1; languages without a share are left out.

    `tokens` are the training tokens by language. Shares are in proportion to tokens ** temperature, or to the
    `fixed` weights.

    Raises DataError when `fixed` names a language that is not there, or its weights are no weights.
    """
    if fixed is None:
        raw = {language: float(count) ** temperature for language, count in tokens.items() if count > 0}
    else:
        raw = _checked(fixed, tokens)
    total = sum(raw.values())
    return {language: weight / total for language, weight in sorted(raw.items())}


def _checked(fixed: Mapping[str, float], tokens: Mapping[str, int]) -> dict[str, float]:
    valid = ", ".join(sorted(tokens))
    for language, weight in fixed.items():
        if language not in tokens:
            raise DataError(f"data.weights names {language!r}, which has no training text; valid: {valid}")
        if not (math.isfinite(weight) and weight >= 0):
            raise DataError(f"data.weights gives {language!r} the weight {weight}, expected 0 or more")
    positive = {language: float(weight) for language, weight in fixed.items() if weight > 0}
    if not positive:
        raise DataError(f"data.weights gives no language a weight above 0; valid languages: {valid}")
    return positive


def quotas(shares: tuple[float, ...], total: int) -> np.ndarray:
    """How many of the first `total` samples each language has; int64 [L], never falling as `total` grows.

    Shares are positive and sum to 1. The s-th sample of a language is due at (s + 1/2) / share, and the `total`
    earliest are taken: the divisor method of Webster and Sainte-Laguë, which, unlike largest remainders, never
    takes back what it gave.
    """
    weights = np.asarray(shares)
    # Everything due this early is surely among the first `total`; at most 1.5 L samples are then left to give.
    early = max(0, total - len(shares))
    counts = np.floor(weights * early + 0.5).astype(np.int64)
    for _ in range(total - int(counts.sum())):
        counts[np.argmin((counts + 0.5) / weights)] += 1
    return counts


@dataclass(frozen=True)
class SampleOrder:
    """The languages of all samples, in order. `shares` are positive and sum to 1."""

    shares: tuple[float, ...]
    seed: int

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Language (its index in `shares`) and how many earlier samples that language had; int64 [N] each."""
        languages = np.empty(samples.shape, dtype=np.int64)
        earlier = np.empty(samples.shape, dtype=np.int64)
        blocks, places = np.divmod(samples, BLOCK_SAMPLES)
        for block in np.unique(blocks):
            here = blocks == block
            plan = _plan_block(self.shares, self.seed, int(block))
            languages[here], earlier[here] = plan[0][places[here]], plan[1][places[here]]
        return languages, earlier


@lru_cache(maxsize=64)
def _plan_block(shares: tuple[float, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    first = quotas(shares, block * BLOCK_SAMPLES)
    counts = quotas(shares, (block + 1) * BLOCK_SAMPLES) - first
    places = np.arange(BLOCK_SAMPLES)
    shuffle = np.argsort(mix(places, key=key_of("block", seed, block)), kind="stable")
    languages = np.repeat(np.arange(len(shares)), counts)[shuffle]
    earlier = np.empty(BLOCK_SAMPLES, dtype=np.int64)
    # Inside the block a language's samples count up in order of place.
    begins = np.cumsum(counts) - counts
    earlier[np.argsort(languages, kind="stable")] = np.repeat(first - begins, counts) + places
    return languages, earlier


def window_of(earlier: np.ndarray, *, num_windows: int, language: str, seed: int) -> np.ndarray:
    """The window that a language's sample number `earlier` takes; int64 [N].

    Each run of `num_windows` samples, an epoch, takes every window once, in an order of its own.
    """
    epochs, places = np.divmod(earlier, num_windows)
    windows = np.empty(earlier.shape, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        key = key_of("windows", seed, language, int(epoch))
        windows[here] = permute(places[here], size=num_windows, key=key)
    return windows
