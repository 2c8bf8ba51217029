"""Small made-up corpora."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

SCRIPTS = {
    "bg": "абвгдежзийклмнопрст",
    "el": "αβγδεζηθικλμνξοπρστ",
    "mt": "abċdefġghħijklmnopqż",
}
LATIN = "abcdefghijklmnoprstu"


def made_up_texts(language: str, *, documents: int, words: int = 60) -> list[str]:
    """Documents of made-up words in the language's letters; the same at every call."""
    source = random.Random(language)
    letters = SCRIPTS.get(language, LATIN)
    lexicon = ["".join(source.choices(letters, k=source.randint(2, 9))) for _ in range(150)]
    return [" ".join(source.choices(lexicon, k=source.randint(words // 2, words))) + "." for _ in range(documents)]


def write_corpus(folder: Path, texts: Mapping[str, Sequence[str]]) -> Path:
    """One `LANGUAGE.jsonl` for each language."""
    folder.mkdir(parents=True, exist_ok=True)
    for language, documents in texts.items():
        rows = (json.dumps({"text": text, "source": "made up"}, ensure_ascii=False) + "\n" for text in documents)
        (folder / f"{language}.jsonl").write_text("".join(rows), encoding="utf-8")
    return folder
