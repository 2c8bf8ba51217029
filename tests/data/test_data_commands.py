"""`amalthea data` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.corpora import made_up_texts, write_corpus

from amalthea.cli.main import run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", {code: made_up_texts(code, documents=30) for code in ("el", "mt")})


def _prepare(corpus: Path, tmp_path: Path, *more: str) -> list[str]:
    return ["data", "prepare", "--path", str(corpus), "--vocab-size", "400", "--cache-dir", str(tmp_path), *more]


def test_prepare_then_inspect(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_prepare(corpus, tmp_path, "--seq-len", "32", "--json")) == 0
    prepared = json.loads(capsys.readouterr().out)
    rows = {row["language"]: row for row in prepared["languages"]}
    assert sorted(rows) == ["el", "mt"]
    assert rows["mt"]["documents"] == 30
    assert rows["mt"]["sequences"] == -(-rows["mt"]["train_tokens"] // 32)
    assert rows["mt"]["tokens_per_byte"] == rows["mt"]["tokens"] / rows["mt"]["bytes"]

    assert run(["data", "inspect", prepared["path"]]) == 0
    shown = capsys.readouterr().out
    assert f"{rows['mt']['tokens']:,}" in shown
    assert "made up  unknown" in shown

    assert run(["data", "inspect", prepared["path"], "--sample", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["languages"]:
        assert row["sample"]
        assert any(text.startswith(row["sample"]) for text in made_up_texts(row["language"], documents=30))


def test_inspect_text(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "inspect", str(corpus), "--sample", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["languages"]
    texts = made_up_texts("el", documents=30)
    assert rows[0]["language"] == "el"
    assert rows[0]["bytes"] == sum(len(text.encode()) for text in texts)
    assert texts[0].startswith(rows[0]["sample"])


def test_errors_are_one_line_and_code_2(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for arguments, message in (
        (["data", "inspect", str(tmp_path / "nowhere")], "does not exist"),
        ([*_prepare(corpus, tmp_path), "--vocab-size", "90000"], "asked for 90000; set data.tokenizer.vocab_size="),
        (["data", "demo", "--cache-dir", str(tmp_path / "cache")], "set data.path=DIR"),
    ):
        assert run(arguments) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.startswith("error: ")
        assert printed.count("\n") == 1
