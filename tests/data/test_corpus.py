"""Folders of text: languages by field, stem and folder; every way to be unreadable has its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from amalthea.core.errors import DataError
from amalthea.data.corpus import corpus_checksum, corpus_sources, read_corpus


def _write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_language_comes_from_field_then_stem_then_folder(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b", "language": "mt", "source": "law"}, {"text": "  "}, {"text": "c"}]
    _write(tmp_path / "de.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    _write(tmp_path / "fr" / "part-1.jsonl", '{"text": "d"}')
    _write(tmp_path / "pt-BR.txt", "e\r\nf")
    _write(tmp_path / "ga" / "deep" / "story.txt", "\ufeffg")
    _write(tmp_path / "web.txt", "h")
    _write(tmp_path / ".hidden" / "de.txt", "hidden")
    _write(tmp_path / "notes.md", "ignored")
    found = {(document.text, document.language) for document in read_corpus(tmp_path)}
    assert found == {
        ("a", "de"),
        ("b", "mt"),
        ("c", "de"),
        ("d", "fr"),
        ("e\r\nf", "pt-BR"),
        ("g", "ga"),
        ("h", "und"),
    }
    sources = {document.text: document.source for document in read_corpus(tmp_path)}
    assert sources["b"] == "law"
    assert sources["a"] == tmp_path.name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "not valid JSON"),
        ("[1]", "a JSON list, expected an object"),
        ('{"body": "x"}', "no `text`, expected an object"),
        ('{"text": 3}', "`text` that is a int"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        ('{"text": "\\ud800"}', "not valid Unicode"),
        ('{"text": "x", "language": "../x"}', "expected a code such as 'de'"),
    ],
)
def test_bad_line_names_file_and_line(tmp_path: Path, line: str | bytes, message: str) -> None:
    line = line.encode() if isinstance(line, str) else line
    path = _write(tmp_path / "de.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    documents = read_corpus(tmp_path)
    assert next(documents).text == "fine"  # what comes before it is read: nothing waits for the whole file
    with pytest.raises(DataError) as caught:
        next(documents)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_text_file_names_its_line(tmp_path: Path) -> None:
    path = _write(tmp_path / "de.txt", b"eins\nzwei\ndr\xe4i\n")
    with pytest.raises(DataError, match=f"{path}:3: not valid UTF-8"):
        list(read_corpus(tmp_path))


def test_missing_and_empty_corpora(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist; set data\.path"):
        list(read_corpus(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"holds no \.txt or \.jsonl file"):
        list(read_corpus(tmp_path))
    path = _write(tmp_path / "de.txt", " \n")
    with pytest.raises(DataError, match="is empty: its files hold no text"):
        list(read_corpus(tmp_path))
    with pytest.raises(DataError, match="is a file; set"):
        list(read_corpus(path))


def test_checksum_is_of_names_and_contents(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        _write(folder / "de.txt", "Hallo")
        _write(folder / "fr.txt", "Salut")
    assert corpus_checksum(first) == corpus_checksum(second)
    _write(second / "fr.txt", "salut")
    changed = corpus_checksum(second)
    assert changed != corpus_checksum(first)
    _write(second / "fr.txt", "Salut").rename(second / "it.txt")
    assert corpus_checksum(second) not in (changed, corpus_checksum(first))


def test_licences_come_from_the_manifest(tmp_path: Path) -> None:
    assert corpus_sources(tmp_path) == {}
    _write(tmp_path / "manifest.json", '{"sources": {"law": {"licence": "CC-BY-4.0"}}}')
    assert corpus_sources(tmp_path)["law"]["licence"] == "CC-BY-4.0"
    _write(tmp_path / "manifest.json", "[]")
    with pytest.raises(DataError, match="is no manifest"):
        corpus_sources(tmp_path)
