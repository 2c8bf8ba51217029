"""Batches are a pure function of step and row: the same for every number of ranks, and resumable anywhere."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.corpora import made_up_texts, write_corpus

from amalthea.core.errors import DataError
from amalthea.data.batch import IGNORED
from amalthea.data.config import DataConfig, TokenizerConfig
from amalthea.data.dataset import PreparedData, TrainData, ValidationData, prepare

SEQ_LEN = 32
SEQUENCES = 12
CONFIG = DataConfig(path="-", seq_len=SEQ_LEN, tokenizer=TokenizerConfig(vocab_size=400), val_tokens_per_language=150)
DOCUMENTS = {"de": 60, "el": 25, "mt": 8, "ga": 1}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    folder = tmp_path_factory.mktemp("data")
    texts = {code: made_up_texts(code, documents=number) for code, number in DOCUMENTS.items()}
    corpus = write_corpus(folder / "corpus", texts)
    return prepare(CONFIG.model_copy(update={"path": str(corpus)}), cache_dir=folder / "cache")


def _train(prepared: PreparedData, config: DataConfig = CONFIG, *, seed: int = 3) -> TrainData:
    return TrainData(prepared, config, seed=seed, global_batch_sequences=SEQUENCES)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_together_see_the_global_batch(prepared: PreparedData, num_ranks: int) -> None:
    share = SEQUENCES // num_ranks
    for step in (0, 1, 40):
        whole = _train(prepared).batch(step, range(SEQUENCES))
        parts = [_train(prepared).batch(step, range(rank * share, (rank + 1) * share)) for rank in range(num_ranks)]
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
        assert sum((part.document_lengths for part in parts), ()) == whole.document_lengths
        assert sum((part.languages for part in parts), ()) == whole.languages


def test_another_batch_size_gives_the_same_samples(prepared: PreparedData) -> None:
    """Rows are counted through the run, so that step 2 of 12 begins where step 4 of 6 does."""
    small = TrainData(prepared, CONFIG, seed=3, global_batch_sequences=6)
    assert torch.equal(small.batch(4, range(6)).tokens, _train(prepared).batch(2, range(6)).tokens)


def test_batches_are_what_they_say(prepared: PreparedData) -> None:
    tokenizer = prepared.tokenizer
    for step in range(6):
        batch = _train(prepared).batch(step, range(SEQUENCES))
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        assert batch.tokens.shape == batch.labels.shape == (SEQUENCES, SEQ_LEN)
        for row in range(SEQUENCES):
            tokens, labels = batch.tokens[row].tolist(), batch.labels[row].tolist()
            assert sum(batch.document_lengths[row]) == SEQ_LEN
            begins = np.cumsum((0, *batch.document_lengths[row]))
            for begin, end in pairwise(begins):
                # Whole or cut at the window's edges; never two documents under one length.
                assert tokenizer.bos_id not in tokens[begin + 1 : end]
                assert tokenizer.eos_id not in tokens[begin : end - 1]
                assert labels[begin : end - 1] == tokens[begin + 1 : end]
                assert (labels[end - 1] == IGNORED) == (tokens[end - 1] == tokenizer.eos_id)


def test_every_window_once_before_any_comes_again(prepared: PreparedData) -> None:
    data = _train(prepared)
    assert all(data.num_windows(language) >= 1 for language in prepared.languages)
    languages, windows = data.locate(np.arange(2000))
    for index, language in enumerate(data.weights):
        mine, number = windows[languages == index], data.num_windows(language)
        assert len(mine) > number  # the test goes past an epoch
        for begin in range(0, len(mine) - number + 1, number):
            assert sorted(mine[begin : begin + number]) == list(range(number))


def test_languages_come_in_their_shares(prepared: PreparedData) -> None:
    data = _train(prepared)
    tokens = {language: prepared.num_tokens(language) ** 0.5 for language in prepared.languages}
    for language, weight in data.weights.items():
        assert weight == pytest.approx(tokens[language] / sum(tokens.values()))
    seen = Counter(language for step in range(64) for language in data.batch(step, range(SEQUENCES)).languages)
    for language, weight in data.weights.items():
        assert seen[language] == pytest.approx(weight * 64 * SEQUENCES, abs=3)


def test_fixed_weights_and_unknown_languages(prepared: PreparedData) -> None:
    data = _train(prepared, CONFIG.model_copy(update={"weights": {"mt": 1.0}}))
    assert set(data.batch(0, range(SEQUENCES)).languages) == {"mt"}
    assert data.num_windows("de") == 0
    with pytest.raises(DataError, match="names 'sv', which has no training text; valid: de, el, ga, mt"):
        _train(prepared, CONFIG.model_copy(update={"weights": {"sv": 1.0}}))


def test_seeds_give_other_orders(prepared: PreparedData) -> None:
    first, second = (_train(prepared, seed=seed).batch(0, range(SEQUENCES)) for seed in (0, 1))
    assert not torch.equal(first.tokens, second.tokens)


def test_too_little_text_for_one_window(prepared: PreparedData) -> None:
    total = sum(prepared.num_tokens(language) for language in prepared.languages)
    _train(prepared, CONFIG.model_copy(update={"seq_len": total}))
    with pytest.raises(DataError, match=rf"{total} training tokens, .*data\.seq_len={total + 1}; bring more text"):
        _train(prepared, CONFIG.model_copy(update={"seq_len": total + 1}))


def test_validation_covers_held_out_text_up_to_the_limit(prepared: PreparedData) -> None:
    data = ValidationData(prepared, CONFIG)
    assert data.languages == ("de", "el", "mt")  # Irish has one document, and that is trained on
    assert data.num_sequences("ga") == 0
    for language in data.languages:
        held_out = prepared.num_tokens(language, split="val")
        limit = min(held_out, CONFIG.val_tokens_per_language)
        rows = data.num_sequences(language)
        assert rows == -(-limit // SEQ_LEN)
        batch = data.batch(language, range(rows))
        assert batch.languages == (language,) * rows
        assert batch.num_labels <= limit
        tokens = batch.tokens.reshape(-1)
        assert (tokens[limit:] == prepared.tokenizer.eos_id).all()
        assert (batch.labels.reshape(-1)[limit:] == IGNORED).all()
        for row in range(rows):
            assert torch.equal(data.batch(language, range(row, row + 1)).tokens[0], batch.tokens[row])
        # All of the language's own held-out documents, when they fit.
        everything = ValidationData(prepared, CONFIG.model_copy(update={"val_tokens_per_language": held_out}))
        whole = everything.batch(language, range(everything.num_sequences(language)))
        expected = Counter(prepared.shard(language, split="val").tokens.tolist())
        assert Counter(whole.tokens.reshape(-1)[:held_out].tolist()) == expected
        assert whole.num_labels == held_out - prepared.num_documents(language, split="val")


def test_validation_can_be_switched_off(prepared: PreparedData) -> None:
    assert ValidationData(prepared, CONFIG.model_copy(update={"val_tokens_per_language": 0})).languages == ()


def test_one_document_is_enough_to_train(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(" ".join(made_up_texts("de", documents=30)))
    config = CONFIG.model_copy(update={"path": str(tmp_path), "tokenizer": TokenizerConfig(vocab_size=300)})
    prepared = prepare(config, cache_dir=tmp_path / "cache")
    assert _train(prepared, config).batch(0, range(2)).languages == ("und", "und")
    assert ValidationData(prepared, config).languages == ()
