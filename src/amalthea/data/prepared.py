"""A prepared corpus on disk: token shards, their tokenizer, and where the text came from.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from amalthea.data.folders import check_files, combined_checksum, read_manifest
from amalthea.data.shards import Shard, open_shard
from amalthea.data.tokenizer import Tokenizer

PREPARED_KIND = "prepared corpus"
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Provenance:
    """How much text of a language came from a source, held-out text included, and under which licence.

    `licence` is None where the corpus does not say. `tokens` count each document's `<|bos|>` and `<|eos|>`.
    """

    language: str
    source: str
    licence: str | None
    documents: int
    num_bytes: int
    tokens: int


@dataclass(frozen=True)
class PreparedData:
    """A folder of token shards with its tokenizer; see `open_prepared`."""

    path: Path
    manifest: dict[str, Any]

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of all languages, sorted; each has training text."""
        return tuple(sorted(self.manifest["languages"]))

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    @property
    def checksum(self) -> str:
        """Of everything that batches are made of, wherever it lies: token shards and tokenizer."""
        return combined_checksum({name: entry["sha256"] for name, entry in self.manifest["files"].items()})

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path / TOKENIZER_FILE)

    @property
    def token_bytes(self) -> np.ndarray:
        """Bytes of UTF-8 that each token stands for, 0 for special ones; int64 [V]."""
        return self.tokenizer.token_bytes

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """One entry for each language and source."""
        licences = self.manifest["sources"]
        return tuple(
            Provenance(
                language=language,
                source=source,
                licence=licences.get(source, {}).get("licence"),
                documents=entry["documents"],
                num_bytes=entry["bytes"],
                tokens=entry["tokens"],
            )
            for language, found in sorted(self.manifest["languages"].items())
            for source, entry in sorted(found["sources"].items())
        )

    def num_documents(self, language: str, *, split: str = "train") -> int:
        return self._count(language, split, "documents")

    def num_tokens(self, language: str, *, split: str = "train") -> int:
        return self._count(language, split, "tokens")

    def shard(self, language: str, *, split: str = "train") -> Shard:
        """The documents of a language. Raises DataError naming a damaged file."""
        return open_shard(self.path, language=language, split=split, vocab_size=self.vocab_size)

    def _count(self, language: str, split: str, what: str) -> int:
        return int(self.manifest["languages"][language].get(split, {}).get(what, 0))


def open_prepared(path: Path, *, checksums: bool = True) -> PreparedData:
    """The prepared corpus of a folder, its files checked by size and, unless told not to, by checksum.

    Raises DataError naming the file that is missing or damaged.
    """
    manifest = read_manifest(path, kind=PREPARED_KIND)
    check_files(path, manifest["files"], checksums=checksums)
    return PreparedData(path=path, manifest=manifest)
