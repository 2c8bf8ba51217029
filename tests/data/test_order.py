"""The order of samples: pure, in exact proportions, every window once before any comes again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amalthea.core.errors import DataError
from amalthea.data.hashing import permute, shuffled
from amalthea.data.order import BLOCK_SAMPLES, SampleOrder, mixture_weights, quotas, window_of

SHARES = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=24).map(
    lambda weights: tuple(weight / sum(weights) for weight in weights)
)


def test_temperature_between_as_they_come_and_evenly() -> None:
    tokens = {"de": 900, "mt": 100}
    assert mixture_weights(tokens, temperature=1.0) == pytest.approx({"de": 0.9, "mt": 0.1})
    assert mixture_weights(tokens, temperature=0.5) == pytest.approx({"de": 0.75, "mt": 0.25})
    assert mixture_weights(tokens, temperature=0.0) == pytest.approx({"de": 0.5, "mt": 0.5})
    assert mixture_weights(tokens, temperature=0.5, fixed={"mt": 3, "de": 1}) == {"de": 0.25, "mt": 0.75}
    assert mixture_weights(tokens, temperature=0.5, fixed={"mt": 3, "de": 0}) == {"mt": 1.0}


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"xx": 1.0}, "names 'xx', which has no training text; valid: de, mt"),
        ({"de": -1.0}, "gives 'de' the weight -1.0, expected 0 or more"),
        ({"de": float("nan")}, "gives 'de' the weight nan"),
        ({"de": 0.0}, "gives no language a weight above 0; valid languages: de, mt"),
    ],
)
def test_bad_weights_are_explained(fixed: dict[str, float], message: str) -> None:
    with pytest.raises(DataError) as caught:
        mixture_weights({"de": 1, "mt": 1}, temperature=0.5, fixed=fixed)
    assert message in str(caught.value)


@given(SHARES, st.integers(0, 10**9), st.integers(0, 1000))
def test_quotas_are_exact_and_never_take_back(shares: tuple[float, ...], total: int, more: int) -> None:
    now, later = quotas(shares, total), quotas(shares, total + more)
    assert now.sum() == total
    assert (later >= now).all()
    # The divisor method stays within half a sample, and the share of what the others' halves move it by.
    allowed = 0.5 + np.array(shares) * len(shares) / 2
    assert (np.abs(now - np.array(shares) * total) <= allowed + 1e-3).all()


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6))
def test_quotas_are_the_earliest_due(weights: list[float]) -> None:
    shares = tuple(weight / sum(weights) for weight in weights)
    due = sorted((sample + 0.5) / share for share in shares for sample in range(60))
    for total in (1, 7, 50):
        counts = quotas(shares, total)
        last = [(count - 0.5) / share for count, share in zip(counts, shares, strict=True) if count]
        assert max(last) == due[total - 1]


@given(SHARES, st.integers(0, 2**32), st.integers(0, 10**12), st.randoms(use_true_random=False))
def test_order_is_a_pure_function_of_the_sample(shares, seed, begin, random) -> None:
    samples = np.arange(begin, begin + 2 * BLOCK_SAMPLES)
    languages, earlier = SampleOrder(shares, seed).locate(samples)
    some = np.array(random.sample(range(len(samples)), 20))
    alone = SampleOrder(shares, seed).locate(samples[some])
    assert np.array_equal(alone[0], languages[some])
    assert np.array_equal(alone[1], earlier[some])


@given(SHARES, st.integers(0, 2**32))
def test_earlier_counts_the_language_and_blocks_keep_proportions(shares, seed) -> None:
    languages, earlier = SampleOrder(shares, seed).locate(np.arange(3 * BLOCK_SAMPLES))
    for index in range(len(shares)):
        mine = earlier[languages == index]
        assert np.array_equal(mine, np.arange(len(mine)))
    for end in (BLOCK_SAMPLES, 2 * BLOCK_SAMPLES):
        counts = np.bincount(languages[:end], minlength=len(shares))
        assert np.array_equal(counts, quotas(shares, end))


def test_seed_shuffles_inside_the_block() -> None:
    shares = (0.5, 0.3, 0.2)
    first, second = (SampleOrder(shares, seed).locate(np.arange(BLOCK_SAMPLES))[0] for seed in (0, 1))
    assert not np.array_equal(first, second)
    assert np.array_equal(np.bincount(first), np.bincount(second))
    blocks = SampleOrder(shares, 0).locate(np.arange(2 * BLOCK_SAMPLES))[0].reshape(2, -1)
    assert not np.array_equal(blocks[0], blocks[1])


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_every_window_once_in_an_epoch(num_windows: int, seed: int) -> None:
    windows = window_of(np.arange(3 * num_windows), num_windows=num_windows, language="mt", seed=seed)
    for epoch in windows.reshape(3, num_windows):
        assert np.array_equal(np.sort(epoch), np.arange(num_windows))


def test_epochs_languages_and_seeds_have_orders_of_their_own() -> None:
    def windows(begin: int, language: str = "mt", seed: int = 0) -> list[int]:
        return window_of(np.arange(begin, begin + 50), num_windows=50, language=language, seed=seed).tolist()

    orders = [windows(0), windows(50), windows(0, language="ga"), windows(0, seed=1), list(range(50))]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert windows(0) == windows(0)


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_permutations_are_bijections(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size=size, key=key)), np.arange(size))
    assert np.array_equal(np.sort(shuffled(size, key=key)), np.arange(size))


def test_permutation_of_a_huge_range_is_random_access() -> None:
    size = 10**15 + 7
    index = np.array([0, 1, size - 1])
    images = permute(index, size=size, key=5)
    assert len(set(images.tolist())) == 3
    assert ((images >= 0) & (images < size)).all()
    assert permute(index[1:2], size=size, key=5)[0] == images[1]


def test_permutation_scatters() -> None:
    """Neighbours do not stay neighbours: the mean distance is that of random pairs, a third of the range."""
    images = permute(np.arange(10_000), size=10_000, key=1)
    assert np.abs(np.diff(images)).mean() == pytest.approx(10_000 / 3, rel=0.05)
