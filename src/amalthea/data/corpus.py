"""Text as people have it: folders of `.txt` and `.jsonl` files.

A `.txt` file is one document. A line of a `.jsonl` file is an object with `text` and, if known, `language` and
`source`. Without the field, the language is the file's stem (`de.jsonl`) or the nearest folder that is named by
a code (`de/…`), else `und`, undetermined. A `manifest.json` may give the sources' licences:
`{"sources": {"NAME": {"licence": "CC-BY-4.0"}}}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amalthea.core.errors import DataError
from amalthea.data.folders import MANIFEST, combined_checksum, file_sha256

UNDETERMINED = "und"
"""Code of text whose language nobody named."""

_SUFFIXES = (".txt", ".jsonl")
_LANGUAGE = re.compile(r"[a-z]{2}([-_][A-Za-z0-9]{2,8})*|[a-z]{3}_[A-Z][a-z]{3}")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True)
class Document:
    """One text; `data` is `text` in UTF-8."""

    text: str
    data: bytes
    language: str
    source: str


def corpus_files(folder: Path) -> list[Path]:
    """The files of a corpus in a fixed order; hidden ones are left out.

    Raises DataError when the folder is missing or holds none.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"corpus {folder} {what}; set data.path to a folder of .txt and .jsonl files")
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in _SUFFIXES and path.is_file() and not _is_hidden(path.relative_to(folder))
    ]
    if not files:
        raise DataError(f"corpus {folder} holds no .txt or .jsonl file; put text there or set data.path")
    return files


def read_corpus(folder: Path) -> Iterator[Document]:
    """Every document that has text, in a fixed order, one in memory at a time.

    Raises DataError naming file and line when one cannot be read, or the folder when it has no text at all.
    """
    empty = True
    for path in corpus_files(folder):
        documents = _read_jsonl(path, folder) if path.suffix == ".jsonl" else _read_txt(path, folder)
        for document in documents:
            empty = False
            yield document
    if empty:
        raise DataError(f"corpus {folder} is empty: its files hold no text")


def corpus_checksum(folder: Path) -> str:
    """One checksum for the names and contents of a corpus' files."""
    try:
        return combined_checksum(
            {path.relative_to(folder).as_posix(): file_sha256(path) for path in corpus_files(folder)}
        )
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None


def corpus_sources(folder: Path) -> dict[str, dict[str, Any]]:
    """What the corpus' own manifest says of its sources, licences foremost; empty without one."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        sources = json.loads(path.read_text(encoding="utf-8")).get("sources", {})
        return {name: dict(entry) for name, entry in sources.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f'{path} is no manifest ({error}), expected {{"sources": {{"NAME": {{"licence": …}}}}}}'
        ) from None


def _read_txt(path: Path, folder: Path) -> Iterator[Document]:
    data = _read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: not valid UTF-8 ({error.reason}); convert the file") from None
    if text.strip():
        yield Document(text, text.encode("utf-8"), _language_of(path, folder), folder.name)


def _read_jsonl(path: Path, folder: Path) -> Iterator[Document]:
    default_language = _language_of(path, folder)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    document = _parse_row(line, f"{path}:{number}", default_language, folder.name)
                    if document.text.strip():
                        yield document
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _parse_row(line: bytes, where: str, default_language: str, default_source: str) -> Document:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 ({error.reason}); convert the file") from None
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error}); each line is one object") from None
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        if not isinstance(row, dict):
            got = f"a JSON {type(row).__name__}"
        elif "text" in row:
            got = f"`text` that is a {type(text).__name__}"
        else:
            got = "no `text`"
        raise DataError(f'{where}: {got}, expected an object like {{"text": "…"}}')
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: `text` is not valid Unicode ({error.reason})") from None
    language = row.get("language") or default_language
    if not isinstance(language, str) or not _SAFE_NAME.fullmatch(language):
        raise DataError(f"{where}: `language` is {language!r}, expected a code such as 'de' or 'pt-BR'")
    return Document(text, data, language, str(row.get("source") or default_source))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _language_of(path: Path, folder: Path) -> str:
    names = [path.stem, *(parent.name for parent in path.relative_to(folder).parents)]
    return next((name for name in names if _LANGUAGE.fullmatch(name)), UNDETERMINED)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
