"""What is trained on, held out, left out and sampled depends on the texts alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from support.corpora import made_up_texts

from amalthea.data.corpus import Document
from amalthea.data.split import DocumentSplit, survey


def _documents(texts: Iterable[str], language: str = "de") -> list[Document]:
    return [Document(text, text.encode(), language, "made up") for text in texts]


def _survey(documents: list[Document], **changes) -> DocumentSplit:
    settings = {"val_fraction": 0.05, "max_bytes_per_language": None, "vocab_size": 100, "seed": 0} | changes
    return survey(documents, **settings)


def _sides(documents: list[Document], **changes) -> dict[str, str | None]:
    split = _survey(documents, **changes)
    return {document.text: split.of(document) for document in documents}


def test_order_of_the_documents_does_not_matter() -> None:
    documents = _documents(made_up_texts("de", documents=300))
    shuffled = random.Random(1).sample(documents, len(documents))
    assert _sides(documents) == _sides(shuffled)
    assert _sides(documents, max_bytes_per_language=9000) == _sides(shuffled, max_bytes_per_language=9000)


def test_more_text_moves_no_document() -> None:
    documents = _documents(made_up_texts("de", documents=300))
    small, large = _sides(documents[:200]), _sides(documents)
    assert all(large[text] == side for text, side in small.items())


def test_about_the_fraction_is_held_out() -> None:
    sides = Counter(_sides(_documents(made_up_texts("de", documents=2000)), val_fraction=0.1).values())
    assert sides["val"] / sides.total() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("number", [2, 3, 20])
def test_two_documents_make_one_of_each(number: int, fraction: float) -> None:
    sides = set(_sides(_documents(made_up_texts("de", documents=number)), val_fraction=fraction).values())
    assert sides == {"train", "val"}


def test_a_single_text_is_trained_on_however_often_it_comes() -> None:
    assert set(_sides(_documents(["the same text"] * 3), val_fraction=0.9).values()) == {"train"}


def test_a_limit_keeps_about_that_many_bytes_of_each_language() -> None:
    german, maltese = (_documents(made_up_texts(code, documents=200), code) for code in ("de", "mt"))
    split = _survey(german + maltese[:2], max_bytes_per_language=20_000)
    kept = [document for document in german if split.of(document)]
    longest = max(len(document.data) for document in german)
    assert 20_000 <= sum(len(document.data) for document in kept) < 20_000 + longest
    assert {split.of(document) for document in kept} == {"train", "val"}
    assert {split.of(document) for document in maltese[:2]} == {"train", "val"}
    assert any(_sides(german, max_bytes_per_language=1).values())


def test_the_tokenizer_sees_training_text_in_equal_shares() -> None:
    """A language with a twentieth of the text gets a third of the characters, not a twentieth."""
    documents = [
        *_documents(made_up_texts("de", documents=400), "de"),
        *_documents(made_up_texts("el", documents=400), "el"),
        *_documents(made_up_texts("mt", documents=20), "mt"),
    ]
    split = _survey(documents, vocab_size=60)
    language_of = {document.text: document.language for document in documents}
    sample = list(split.tokenizer_sample(documents))
    assert {split.of(document) for document in documents if document.text in set(sample)} == {"train"}
    characters: Counter[str] = Counter()
    for text in sample:
        characters[language_of[text]] += len(text)
    wanted = 60 * 400 / 3
    for language in ("de", "el", "mt"):
        assert characters[language] == pytest.approx(wanted, rel=0.35), language
    assert max(Counter(sample).values()) <= 4
    assert sample == list(split.tokenizer_sample(documents))
    assert set(sample) != set(_survey(documents, vocab_size=60, seed=1).tokenizer_sample(documents))
