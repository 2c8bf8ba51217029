"""The demo corpus: what counts as a sentence, how catalogues are read, and what pip may do wrong.

pip is the real one, pointed at packages that the test makes; the network is never used.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from amalthea.core.errors import DataError
from amalthea.data.catalogues import parse_mo, parse_po, read_json_units, read_mo_units, read_po_units
from amalthea.data.corpus import corpus_sources, read_corpus
from amalthea.data.demo import DEMO_KIND, EU_LANGUAGES, SOURCES, Source, fetch_demo, is_whole_demo
from amalthea.data.folders import read_manifest
from amalthea.data.sentences import sentences
from amalthea.launch.paths import cache_dir


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Das Gerät ist bereits eingerichtet.", ["Das Gerät ist bereits eingerichtet."]),
        ("OK, gut", []),
        ("Fehler {code}", []),
        ("Siehe [die Anleitung hier]({url}) für mehr.", ["Siehe die Anleitung hier für mehr."]),
        ("Bitte **immer** `sofort` neu starten!", ["Bitte immer sofort neu starten!"]),
        (
            "<p>Żomm ruħek aġġornat.</p><p>Aqra <b>dan kollu</b> sew.</p>",
            ["Żomm ruħek aġġornat.", "Aqra dan kollu sew."],
        ),
        ("Der Name fehlt noch. Der Wert %(x)s ist zu groß.", ["Der Name fehlt noch."]),
        ("Hello ${name}! This one is whole.", ["This one is whole."]),
        ("- Erster Punkt der Liste\n2. Zweiter Punkt der Liste", ["Erster Punkt der Liste", "Zweiter Punkt der Liste"]),
        ("Zeile   mit\u00a0vielen  Leerzeichen darin", ["Zeile mit vielen Leerzeichen darin"]),
        ("Mehr unter https://example.org für alle", []),
        ("1 2 3 4 5 6 7 acht neun", []),
        ("Recht &amp; Ordnung im Haus", ["Recht & Ordnung im Haus"]),
    ],
)
def test_sentences(message: str, expected: list[str]) -> None:
    assert list(sentences(message)) == expected


def _mo(messages: dict[str, str], order: str = "<") -> bytes:
    """A compiled gettext catalogue."""
    pairs = [(key.encode(), message.encode()) for key, message in sorted(messages.items())]
    count, header = len(pairs), 28
    data, tables = b"", ([], [])
    begin = header + 16 * count
    for column in (0, 1):
        for pair in pairs:
            tables[column].append(struct.pack(f"{order}2I", len(pair[column]), begin + len(data)))
            data += pair[column] + b"\0"
    head = struct.pack(f"{order}7I", 0x950412DE, 0, count, header, header + 8 * count, 0, 0)
    return head + b"".join(tables[0] + tables[1]) + data


@pytest.mark.parametrize("order", ["<", ">"])
def test_compiled_catalogues_in_either_byte_order(order: str) -> None:
    messages = {"": "Language: mt", "menu\x04Open": "Iftaħ", "%d day\0%d days": "ġurnata\0ġranet"}
    assert list(parse_mo(_mo(messages, order))) == [("%d day", "ġurnata"), ("%d day", "ġranet"), ("Open", "Iftaħ")]
    with pytest.raises(ValueError, match="not a compiled gettext catalogue"):
        list(parse_mo(b"PK\x03\x04 something else"))


def test_gettext_sources_with_everything_that_they_hold() -> None:
    text = """msgid ""
msgstr "Language: mt\\n"

#. Default: "Open"
#: file.py:3
msgctxt "menu"
msgid "Open \\"it\\""
msgstr "Iftaħ "
"\\"dan\\""

#, fuzzy, python-format
msgid "Guess"
msgstr "Tbassir"

msgid "%d day"
msgid_plural "%d days"
msgstr[0] "ġurnata"
msgstr[1] "ġranet"

#~ msgid "Old one"
#~ msgstr ""
#~ "Antik\\n"
#~ "wieħed"
"""
    assert list(parse_po(text)) == [
        ('Open "it"', 'Iftaħ "dan"'),
        ("%d day", "ġurnata"),
        ("%d day", "ġranet"),
        ("Old one", "Antik\nwieħed"),
    ]


# A corpus of three small packages


def _wheel(folder: Path, package: str, files: dict[str, str | bytes]) -> str:
    """A package that pip accepts; returns its hash."""
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _json(**messages: object) -> str:
    return json.dumps(messages, ensure_ascii=False)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Source, ...]:
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    lamp, door = "home/components/lamp/translations", "home/components/door/translations"
    home = {
        f"{lamp}/en.json": _json(a="The lamp is on now.", b={"c": "Untranslated text stays English."}),
        f"{lamp}/de.json": _json(a="Die Lampe ist jetzt an.", b={"c": "Untranslated text stays English."}),
        f"{door}/de.json": _json(a="Die Lampe ist jetzt an.", z="Die Türe ist zu. Code {code}"),
        f"{door}/en.json": _json(z="The door is shut. Code {code}"),
        f"{door}/xx.json": _json(z="Not a language of the EU."),
    }
    admin = {
        "admin/locale/ga/LC_MESSAGES/django.mo": _mo({"The page was saved.": "Sábháladh an leathanach anois."}),
        "admin/locale/en_GB/LC_MESSAGES/django.mo": _mo({"The page was saved.": "Blimey, it is a page."}),
    }
    osha = {
        "osha/locales/mt/LC_MESSAGES/risk.po": (
            'msgid "Do you want to delete this?"\nmsgstr "Trid tħassar dan ir-riskju?"\n\n'
            'msgid "The door is shut."\nmsgstr "The door is shut."\n'
        )
    }
    made = (("Home", "home", home, read_json_units), ("Admin", "admin", admin, read_mo_units))
    made += (("Osha", "osha.oira", osha, read_po_units),)
    return tuple(
        Source(name, package, "1.0", _wheel(packages, package.replace(".", "_"), files), "MIT", read)
        for name, package, files, read in made
    )


def test_text_comes_out_by_language_and_source(sources: tuple[Source, ...], tmp_path: Path) -> None:
    said: list[str] = []
    folder = fetch_demo(tmp_path / "cache", progress=said.append, sources=sources)
    rows = [(document.language, document.source, document.text) for document in read_corpus(folder)]
    # Components come by name. What one repeats of another, or of English, is left out.
    assert sorted(rows) == [
        ("de", "Home", "Die Lampe ist jetzt an.\nDie Türe ist zu."),
        ("en", "Admin", "The page was saved."),
        ("en", "Home", "The door is shut.\nThe lamp is on now.\nUntranslated text stays English."),
        ("en", "Osha", "Do you want to delete this?"),
        ("ga", "Admin", "Sábháladh an leathanach anois."),
        ("mt", "Osha", "Trid tħassar dan ir-riskju?"),
    ]
    manifest = read_manifest(folder, kind=DEMO_KIND)
    assert manifest["languages"]["en"]["sources"]["Osha"] == {"licence": "MIT", "documents": 1, "characters": 27}
    assert manifest["languages"]["de"]["documents"] == 1
    assert manifest["sources"]["Osha"]["package"] == "osha.oira"
    assert corpus_sources(folder)["Home"]["licence"] == "MIT"
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        *(f"{c}.jsonl" for c in ("de", "en", "ga", "mt")),
    }
    assert any(line.startswith("reading Home") for line in said)


def test_fetched_once_and_again_when_damaged(
    sources: tuple[Source, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    folder = fetch_demo(cache, sources=sources)
    with monkeypatch.context() as offline:
        offline.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
        assert fetch_demo(cache, sources=sources) == folder
        whole = (folder / "mt.jsonl").read_bytes()
        (folder / "mt.jsonl").write_bytes(whole[:-5])
        assert not is_whole_demo(folder)
        with pytest.raises(DataError, match="could not be fetched"):
            fetch_demo(cache, sources=sources)
    assert fetch_demo(cache, sources=sources) == folder
    assert (folder / "mt.jsonl").read_bytes() == whole
    assert list(cache.iterdir()) == [folder]


def test_no_network_is_one_line_that_says_how_to_go_on(sources: tuple[Source, ...], tmp_path: Path) -> None:
    missing = (replace(sources[0], version="9.9"),)
    with pytest.raises(DataError) as caught:
        fetch_demo(tmp_path / "cache", sources=missing)
    message = str(caught.value)
    assert message.startswith("the demo corpus could not be fetched: pip failed (No matching distribution found")
    assert message.endswith("to train on your own text, put .txt or .jsonl files in a folder and set data.path=DIR")
    assert "\n" not in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_other_bytes_than_the_pinned_are_refused(sources: tuple[Source, ...], tmp_path: Path) -> None:
    forged = (replace(sources[0], sha256="0" * 64),)
    with pytest.raises(DataError, match="could not be fetched: pip failed"):
        fetch_demo(tmp_path / "cache", sources=forged)
    assert list((tmp_path / "cache").iterdir()) == []


def test_every_language_is_pinned_for() -> None:
    assert len(EU_LANGUAGES) == len(set(EU_LANGUAGES)) == 24
    assert all(len(source.sha256) == 64 and source.licence for source in SOURCES)


def test_the_real_corpus_where_it_was_fetched() -> None:
    """Runs where `amalthea data demo` has run, as in `make train`; fetches nothing itself."""
    folder = next((path for path in cache_dir().glob("demo-*") if is_whole_demo(path)), None)
    if folder is None:
        pytest.skip("the demo corpus is not in the cache")
    languages = read_manifest(folder, kind=DEMO_KIND)["languages"]
    assert sorted(languages) == sorted(EU_LANGUAGES)
    for language, found in languages.items():
        assert found["documents"] >= 10, language
        assert found["characters"] >= 40_000, language
        assert all(entry["licence"] for entry in found["sources"].values())
    text = {document.language: document.text for document in read_corpus(folder)}
    assert set("ħġżċ") & set(text["mt"])
    assert set("αεο") < set(text["el"])
    assert set("аео") < set(text["bg"])
