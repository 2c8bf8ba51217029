"""Token shards: one file of tokens and one of document offsets for each language and split.

Both are raw little-endian arrays, mapped into memory: tokens are uint16, or uint32 for vocabularies of 65,536
and more; offsets are int64 and one longer than the documents. A document is `<|bos|> tokens <|eos|>`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from amalthea.core.errors import DataError


@dataclass(frozen=True)
class Shard:
    """Document d is tokens[offsets[d] : offsets[d + 1]]; both arrays lie in mapped files."""

    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def document(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type on disk that holds every token."""
    return np.dtype("<u2" if vocab_size < 65536 else "<u4")


def open_shard(folder: Path, *, language: str, split: str, vocab_size: int) -> Shard:
    """Maps a shard. Raises DataError naming the file when it is missing or its parts do not fit together."""
    tokens_path, offsets_path = _paths(folder, language, split)
    tokens = _map(tokens_path, token_dtype(vocab_size))
    offsets = _map(offsets_path, np.dtype("<i8"))
    if offsets[0] != 0 or offsets[-1] != len(tokens):
        raise DataError(
            f"{offsets_path} is damaged: it ends at token {offsets[-1]}, {tokens_path.name} has {len(tokens)}"
        )
    return Shard(tokens, offsets)


@dataclass
class _Open:
    file: BinaryIO
    num_tokens: int = 0
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))


class ShardWriter:
    """Writes the shards of a folder, document by document; complete after the `with` block ends well."""

    def __init__(self, folder: Path, *, vocab_size: int, bos_id: int, eos_id: int) -> None:
        self._folder = folder
        self._dtype = token_dtype(vocab_size)
        self._bos_id, self._eos_id = bos_id, eos_id
        self._open: dict[tuple[str, str], _Open] = {}

    def add(self, tokens: Sequence[int], *, language: str, split: str) -> int:
        """Appends one document; returns its tokens with `<|bos|>` and `<|eos|>`."""
        shard = self._open.get((language, split))
        if shard is None:
            tokens_path, _ = _paths(self._folder, language, split)
            shard = self._open[language, split] = _Open(tokens_path.open("wb"))
        document = np.empty(len(tokens) + 2, dtype=self._dtype)
        document[0], document[1:-1], document[-1] = self._bos_id, tokens, self._eos_id
        shard.file.write(document.tobytes())
        shard.num_tokens += len(document)
        shard.offsets.append(shard.num_tokens)
        return len(document)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shard in self._open.values():
            shard.file.close()
        if kind is None:
            for (language, split), shard in self._open.items():
                _, offsets_path = _paths(self._folder, language, split)
                offsets_path.write_bytes(np.asarray(shard.offsets, dtype="<i8").tobytes())


def _paths(folder: Path, language: str, split: str) -> tuple[Path, Path]:
    return folder / f"{language}.{split}.tokens", folder / f"{language}.{split}.offsets"


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    try:
        return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
    except FileNotFoundError:
        raise DataError(f"{path} is missing; delete {path.parent} to have it made again") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); delete {path.parent} to have it made again") from None
