"""Makes token shards of a corpus, once for each corpus and set of settings that matter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from amalthea.core.errors import DataError
from amalthea.core.units import format_bytes, format_count
from amalthea.data.config import DataConfig
from amalthea.data.corpus import Document, corpus_checksum, corpus_sources, read_corpus
from amalthea.data.demo import fetch_demo
from amalthea.data.folders import MANIFEST, describe_files, file_sha256, write_json, written_aside
from amalthea.data.prepared import PREPARED_KIND, TOKENIZER_FILE, PreparedData, open_prepared
from amalthea.data.shards import ShardWriter
from amalthea.data.split import DocumentSplit, survey
from amalthea.data.tokenizer import Tokenizer

Progress = Callable[[str], None]

DEMO = "demo"
"""The value of `data.path` that means the demo corpus."""

_FORMAT = 1  # raise when the same corpus and settings would give other shards
_CHUNK_CHARACTERS = 1_000_000


def prepare(config: DataConfig, *, cache_dir: Path, seed: int = 0, progress: Progress | None = None) -> PreparedData:
    """The prepared corpus of `config.path` under `cache_dir`, made when it is not there whole.

    It depends on the corpus' content and on the tokenizer, `val_fraction` and `max_bytes_per_language`; the
    other settings come into play when batches are read. `seed` picks the documents that a tokenizer is trained
    on, nothing else. Several processes may prepare the same corpus at once.

    Raises DataError when the corpus or tokenizer cannot be used.
    """
    say = progress or (lambda message: None)
    corpus = corpus_folder(config, cache_dir=cache_dir, progress=progress)
    target = cache_dir / f"prepared-{_fingerprint(config, corpus, seed)}"
    if target.exists():
        try:
            return open_prepared(target)
        except DataError as error:
            say(f"preparing again: {error}")
    with written_aside(target, is_whole=_is_whole) as folder:
        _make(folder, config, corpus, seed, say)
    return open_prepared(target)


def corpus_folder(config: DataConfig, *, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The folder of text that `config.path` means; fetches the demo corpus when it is that."""
    return fetch_demo(cache_dir, progress=progress) if config.path == DEMO else Path(config.path).expanduser()


def _is_whole(folder: Path) -> bool:
    try:
        open_prepared(folder)
    except DataError:
        return False
    return True


def _fingerprint(config: DataConfig, corpus: Path, seed: int) -> str:
    tokenizer = config.tokenizer
    if tokenizer.path is None:
        tokenizer_key: list[Any] = ["trained", tokenizer.vocab_size, seed]
    else:
        Tokenizer.load(tokenizer.path)  # says what is wrong with it before anything is read
        tokenizer_key = ["file", file_sha256(tokenizer.path)]
    settings = [
        _FORMAT,
        corpus_checksum(corpus),
        tokenizer_key,
        config.val_fraction,
        config.max_bytes_per_language,
    ]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]


def _make(folder: Path, config: DataConfig, corpus: Path, seed: int, say: Progress) -> None:
    say(f"reading {corpus}")
    split = survey(
        read_corpus(corpus),
        val_fraction=config.val_fraction,
        max_bytes_per_language=config.max_bytes_per_language,
        vocab_size=config.tokenizer.vocab_size,
        seed=seed,
    )
    if config.tokenizer.path is None:
        say(f"training a tokenizer of {config.tokenizer.vocab_size} tokens")
        sample = split.tokenizer_sample(read_corpus(corpus))
        tokenizer = Tokenizer.train(sample, vocab_size=config.tokenizer.vocab_size)
    else:
        tokenizer = Tokenizer.load(config.tokenizer.path)
    tokenizer.save(folder / TOKENIZER_FILE)
    languages, left_out = _write_shards(folder, corpus, split, tokenizer, say)
    manifest = {
        "kind": PREPARED_KIND,
        "vocab_size": tokenizer.vocab_size,
        "corpus_checksum": corpus_checksum(corpus),
        "settings": config.model_dump(mode="json", include={"tokenizer", "val_fraction", "max_bytes_per_language"})
        | {"tokenizer_seed": seed},
        "languages": languages,
        "left_out": left_out,
        "sources": corpus_sources(corpus),
        "files": describe_files(folder),
    }
    write_json(folder / MANIFEST, manifest)
    _report(manifest, say)


def _write_shards(
    folder: Path, corpus: Path, split: DocumentSplit, tokenizer: Tokenizer, say: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes every document; returns counts by language, and of what was left out."""
    languages: dict[str, Any] = {}
    left_out: dict[str, Any] = {}
    read, tenths = 0, 0
    with ShardWriter(
        folder, vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id
    ) as writer:
        for chunk in _chunks(read_corpus(corpus)):
            kept = [(document, split.of(document)) for document in chunk]
            for document in (document for document, side in kept if side is None):
                _count(left_out, document.language, document)
            kept = [(document, side) for document, side in kept if side is not None]
            for (document, side), ids in zip(
                kept, tokenizer.encode_batch([document.text for document, _ in kept]), strict=True
            ):
                assert side is not None
                tokens = writer.add(ids, language=document.language, split=side)
                counts = languages.setdefault(document.language, {"sources": {}})
                _count(counts, side, document, tokens)
                _count(counts["sources"], document.source, document, tokens)
            read += sum(len(document.data) for document in chunk)
            if read * 10 // split.num_bytes > tenths:
                tenths = read * 10 // split.num_bytes
                say(f"tokenized {tenths * 10} % of {format_bytes(split.num_bytes)}")
    return languages, left_out


def _chunks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents by about a million characters, enough for every core to have some."""
    chunk: list[Document] = []
    characters = 0
    for document in documents:
        chunk.append(document)
        characters += len(document.text)
        if characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _count(counts: dict[str, Any], name: str, document: Document, tokens: int = 0) -> None:
    entry = counts.setdefault(name, {"documents": 0, "bytes": 0, "tokens": 0})
    entry["documents"] += 1
    entry["bytes"] += len(document.data)
    entry["tokens"] += tokens


def _report(manifest: dict[str, Any], say: Progress) -> None:
    """Says what is in the corpus, and what a user could miss in it."""
    languages, left_out = manifest["languages"], manifest["left_out"]
    tokens = sum(counts["train"]["tokens"] for counts in languages.values())
    say(f"{format_count(tokens)} training tokens in {len(languages)} languages")
    without = [language for language, counts in languages.items() if "val" not in counts]
    if without:
        say(f"no held-out document, so no validation, in {', '.join(without)}: it takes two documents")
    if left_out:
        total = sum(entry["bytes"] for entry in left_out.values())
        names = ", ".join(sorted(left_out))
        say(f"data.max_bytes_per_language left out {format_bytes(total)} of text in {names}")
