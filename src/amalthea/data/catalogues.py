"""Messages out of the translation catalogues of Python packages, read in their archives without installing.

A *unit* is one component or domain of a package: what a document is made of.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

ENGLISH = "en"


@dataclass
class Unit:
    """The messages of one component or domain by language, in the order of the catalogue."""

    name: str
    messages: dict[str, list[str]] = field(default_factory=dict)


Reader = Callable[[zipfile.ZipFile, frozenset[str]], Iterator[Unit]]

_JSON_PATH = re.compile(r"(.*)/translations/([A-Za-z-]+)\.json$")
_CATALOGUE_PATH = re.compile(r"(.*)/[a-z0-9]+/([A-Za-z_]+)/LC_MESSAGES/([^/]+)\.(mo|po)$")


def read_json_units(archive: zipfile.ZipFile, languages: frozenset[str]) -> Iterator[Unit]:
    """Units of `…/COMPONENT/translations/LANGUAGE.json`: trees whose leaves are messages."""
    for name, paths in _group(archive, _JSON_PATH, languages):
        unit = Unit(name)
        for language, path in paths.items():
            unit.messages[language] = _leaves(json.loads(archive.read(path)))
        yield unit


def read_mo_units(archive: zipfile.ZipFile, languages: frozenset[str]) -> Iterator[Unit]:
    """Units of compiled gettext catalogues; their keys are the English messages."""
    yield from _read_gettext(archive, languages, "mo", parse_mo)


def read_po_units(archive: zipfile.ZipFile, languages: frozenset[str]) -> Iterator[Unit]:
    """Units of gettext sources, entries out of use included; their keys are the English messages."""
    yield from _read_gettext(archive, languages, "po", lambda data: parse_po(data.decode("utf-8")))


def parse_mo(data: bytes) -> Iterator[tuple[str, str]]:
    """Pairs (key, message) of a compiled gettext catalogue; every plural form is a pair of its own.

    Raises ValueError when `data` is no such catalogue.
    """
    magic = data[:4]
    if magic not in (b"\xde\x12\x04\x95", b"\x95\x04\x12\xde"):
        raise ValueError("not a compiled gettext catalogue")
    order = "<" if magic[0] == 0xDE else ">"
    _, count, keys_at, messages_at = struct.unpack_from(f"{order}4I", data, 4)

    def string(table: int, index: int) -> bytes:
        length, start = struct.unpack_from(f"{order}2I", data, table + 8 * index)
        return data[start : start + length]

    for index in range(count):
        context_and_key = string(keys_at, index).split(b"\0")[0]
        key = context_and_key.rpartition(b"\x04")[2].decode("utf-8")
        if key:
            for form in string(messages_at, index).split(b"\0"):
                yield key, form.decode("utf-8")


_PO_FIELD = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)?\s*"(.*)"$')
_PO_ESCAPE = re.compile(r"\\(.)")
_PO_ESCAPED = {"n": "\n", "t": "\t", "r": ""}


def parse_po(text: str) -> Iterator[tuple[str, str]]:
    """Pairs (key, message) of a gettext source; entries marked fuzzy are left out."""
    for entry in re.split(r"\n[ \t]*\n", text):
        if "fuzzy" in entry and re.search(r"^#, .*fuzzy", entry, re.MULTILINE):
            continue
        fields: list[tuple[str, list[str]]] = []
        for line in entry.splitlines():
            match = _PO_FIELD.match(line.removeprefix("#~").strip())
            if match and match[1]:
                fields.append((match[1], [match[2]]))
            elif match and fields:
                fields[-1][1].append(match[2])
        key = next((_unescape(parts) for name, parts in fields if name == "msgid"), "")
        if key:
            yield from ((key, _unescape(parts)) for name, parts in fields if name.startswith("msgstr"))


def _unescape(parts: Iterable[str]) -> str:
    return _PO_ESCAPE.sub(lambda match: _PO_ESCAPED.get(match[1], match[1]), "".join(parts))


def _read_gettext(
    archive: zipfile.ZipFile,
    languages: frozenset[str],
    suffix: str,
    parse: Callable[[bytes], Iterable[tuple[str, str]]],
) -> Iterator[Unit]:
    for name, paths in _group(archive, _CATALOGUE_PATH, languages, suffix=suffix):
        unit = Unit(name)
        english: dict[str, None] = {}
        for language, path in paths.items():
            pairs = list(parse(archive.read(path)))
            english.update((key, None) for key, _ in pairs)
            unit.messages[language] = [message for _, message in pairs]
        if ENGLISH in languages:
            unit.messages[ENGLISH] = list(english) + unit.messages.get(ENGLISH, [])
        yield unit


def _group(
    archive: zipfile.ZipFile, pattern: re.Pattern[str], languages: frozenset[str], *, suffix: str | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """(unit name, path by language), sorted."""
    groups: dict[str, dict[str, str]] = {}
    for path in sorted(archive.namelist()):
        match = pattern.match(path)
        if not match or match[2] not in languages:
            continue
        if suffix is None:
            groups.setdefault(match[1], {})[match[2]] = path
        elif match[4] == suffix:
            groups.setdefault(f"{match[1]}/{match[3]}", {})[match[2]] = path
    yield from sorted(groups.items())


def _leaves(tree: object, found: list[str] | None = None) -> list[str]:
    found = [] if found is None else found
    if isinstance(tree, str):
        found.append(tree)
    elif isinstance(tree, dict):
        for branch in tree.values():
            _leaves(branch, found)
    return found
