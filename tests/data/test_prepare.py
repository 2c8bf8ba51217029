"""Preparing once: reused while it is whole, made again when it is not, whoever else does it at the same time."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.corpora import made_up_texts, write_corpus

from amalthea.core.errors import DataError
from amalthea.data.config import DataConfig, TokenizerConfig
from amalthea.data.corpus import read_corpus
from amalthea.data.prepare import prepare
from amalthea.data.prepared import PreparedData, open_prepared
from amalthea.data.shards import ShardWriter
from amalthea.data.tokenizer import Tokenizer

LANGUAGES = ("de", "el", "mt")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", {code: made_up_texts(code, documents=40) for code in LANGUAGES})


def _config(corpus: Path, **changes) -> DataConfig:
    return DataConfig(path=str(corpus), seq_len=32, tokenizer=TokenizerConfig(vocab_size=400), **changes)


def _state(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def _texts(prepared: PreparedData, language: str, split: str) -> list[str]:
    shard = prepared.shard(language, split=split)
    return [prepared.tokenizer.decode(shard.document(index)) for index in range(shard.num_documents)]


def test_every_document_is_there_once_and_accounted_for(corpus: Path, tmp_path: Path) -> None:
    (corpus / "manifest.json").write_text('{"sources": {"made up": {"licence": "CC0-1.0"}}}')
    prepared = prepare(_config(corpus), cache_dir=tmp_path / "cache")
    assert prepared.languages == LANGUAGES
    assert prepared.vocab_size == prepared.tokenizer.vocab_size == len(prepared.token_bytes) == 400
    for entry in prepared.provenance:
        language = entry.language
        texts = {split: _texts(prepared, language, split) for split in ("train", "val")}
        original = [document for document in read_corpus(corpus) if document.language == language]
        assert sorted(texts["train"] + texts["val"]) == sorted(document.text for document in original)
        assert not set(texts["train"]) & set(texts["val"])
        assert len(texts["val"]) == prepared.num_documents(language, split="val") > 0
        assert (entry.source, entry.licence, entry.documents) == ("made up", "CC0-1.0", 40)
        assert entry.num_bytes == sum(len(document.data) for document in original)
        assert entry.tokens == sum(prepared.num_tokens(language, split=split) for split in ("train", "val"))


def test_prepared_once_and_by_content(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = prepare(_config(corpus), cache_dir=cache)
    before = _state(first.path)
    assert prepare(_config(corpus, temperature=1.0, val_tokens_per_language=7), cache_dir=cache).path == first.path
    moved = corpus.rename(tmp_path / "moved")
    assert prepare(_config(moved), cache_dir=cache).path == first.path
    assert _state(first.path) == before
    others = [
        prepare(_config(moved, val_fraction=0.5), cache_dir=cache),
        prepare(_config(moved, max_bytes_per_language=2000), cache_dir=cache),
        prepare(_config(moved), cache_dir=cache, seed=1),
    ]
    (moved / "mt.jsonl").write_text('{"text": "ieħor"}\n{"text": "test"}\n', encoding="utf-8")
    others.append(prepare(_config(moved), cache_dir=cache))
    assert len({prepared.path for prepared in (first, *others)}) == 5
    assert {path.name for path in cache.iterdir()} == {prepared.path.name for prepared in (first, *others)}


def test_two_preparations_are_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    first, second = (prepare(_config(corpus), cache_dir=tmp_path / name).path for name in ("one", "two"))
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }


def test_processes_may_prepare_at_once(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    script = (
        "import sys; from pathlib import Path\n"
        "from amalthea.data.config import DataConfig\n"
        "from amalthea.data.prepare import prepare\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "config = DataConfig.model_validate_json(sys.argv[1])\n"
        "prepared = prepare(config, cache_dir=Path(sys.argv[2]))\n"
        "print(prepared.path, prepared.num_tokens('mt'))\n"
    )
    command = [sys.executable, "-c", script, _config(corpus).model_dump_json(), str(cache)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # all imports are done: the work itself overlaps
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    prepared = prepare(_config(corpus), cache_dir=cache)
    assert answers == {f"{prepared.path} {prepared.num_tokens('mt')}\n"}
    assert list(cache.iterdir()) == [prepared.path]  # nothing of the others is left behind


def test_damage_is_named_and_repaired_by_preparing_again(corpus: Path, tmp_path: Path) -> None:
    prepared = prepare(_config(corpus), cache_dir=tmp_path / "cache")
    path = prepared.path / "mt.train.tokens"
    whole = path.read_bytes()
    for damaged, message in (
        (whole[:-2], f"{path} is damaged: {len(whole) - 2} bytes, expected {len(whole)}"),
        (whole[:-2] + b"\x07\x00", f"{path} is damaged: its checksum differs"),
        (None, f"{path} is missing"),
    ):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            open_prepared(prepared.path)
        said: list[str] = []
        again = prepare(_config(corpus), cache_dir=tmp_path / "cache", progress=said.append)
        assert again.path == prepared.path
        assert said[0].startswith(f"preparing again: {path}")
        assert path.read_bytes() == whole
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [prepared.path.name]


def test_other_folders_are_not_taken_for_prepared_ones(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it is no folder of prepared corpus"):
        open_prepared(corpus)
    (corpus / "manifest.json").write_text('{"kind": "something else"}')
    with pytest.raises(DataError, match="describes 'something else', expected 'prepared corpus'"):
        open_prepared(corpus)
    (corpus / "manifest.json").write_text('{"kind": ')
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        open_prepared(corpus)


def test_a_full_disk_leaves_nothing_behind(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", full)
        with pytest.raises(DataError, match=f"{cache}/prepared-.* could not be written: No space left on device"):
            prepare(_config(corpus), cache_dir=cache)
    assert list(cache.iterdir()) == []
    assert prepare(_config(corpus), cache_dir=cache).languages == LANGUAGES


def test_a_tokenizer_from_a_file_is_used(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    Tokenizer.train(made_up_texts("de", documents=30), vocab_size=300).save(path)
    config = DataConfig(path=str(corpus), seq_len=32, tokenizer=TokenizerConfig(path=path))
    prepared = prepare(config, cache_dir=tmp_path / "cache")
    assert prepared.vocab_size == 300
    assert prepared.tokenizer.encode("ħobż") == Tokenizer.load(path).encode("ħobż")
    with pytest.raises(DataError, match=r"nowhere\.json cannot be read"):
        prepare(
            DataConfig(path=str(corpus), tokenizer=TokenizerConfig(path=tmp_path / "nowhere.json")),
            cache_dir=tmp_path / "cache",
        )


def test_what_is_missing_or_left_out_is_said(tmp_path: Path) -> None:
    texts = {"de": made_up_texts("de", documents=40), "mt": made_up_texts("mt", documents=1)}
    said: list[str] = []
    config = _config(write_corpus(tmp_path / "corpus", texts), max_bytes_per_language=5000)
    prepared = prepare(config, cache_dir=tmp_path / "cache", progress=said.append)
    assert "no held-out document, so no validation, in mt: it takes two documents" in said
    assert any(line.startswith("data.max_bytes_per_language left out ") and line.endswith(" in de") for line in said)
    left_out = prepared.manifest["left_out"]["de"]
    assert left_out["documents"] + sum(prepared.num_documents("de", split=split) for split in ("train", "val")) == 40


def test_errors_of_the_corpus_come_through(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", {"de": made_up_texts("de", documents=40)})
    with (corpus / "de.jsonl").open("a") as file:
        file.write(json.dumps({"txt": "x"}) + "\n")
    with pytest.raises(DataError, match=r"de\.jsonl:41: no `text`"):
        prepare(_config(corpus), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
