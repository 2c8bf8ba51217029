"""Token shards: raw little-endian arrays that anybody can read, and damage that is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from amalthea.core.errors import DataError
from amalthea.data.shards import ShardWriter, open_shard


def _write(folder: Path, *, vocab_size: int) -> None:
    with ShardWriter(folder, vocab_size=vocab_size, bos_id=0, eos_id=1) as writer:
        assert writer.add([5, 6, vocab_size - 1], language="mt", split="train") == 5
        assert writer.add([], language="mt", split="train") == 2
        writer.add([7], language="mt", split="val")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "<u2"), (65535, "<u2"), (65536, "<u4"), (200_000, "<u4")])
def test_documents_come_back_from_raw_files(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    _write(tmp_path, vocab_size=vocab_size)
    expected = [0, 5, 6, vocab_size - 1, 1, 0, 1]
    assert np.fromfile(tmp_path / "mt.train.tokens", dtype=dtype).tolist() == expected
    assert np.fromfile(tmp_path / "mt.train.offsets", dtype="<i8").tolist() == [0, 5, 7]
    shard = open_shard(tmp_path, language="mt", split="train", vocab_size=vocab_size)
    assert (shard.num_documents, shard.num_tokens) == (2, 7)
    assert shard.document(0).tolist() == expected[:5]
    assert open_shard(tmp_path, language="mt", split="val", vocab_size=vocab_size).document(0).tolist() == [0, 7, 1]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    _write(tmp_path, vocab_size=300)

    def open_it() -> None:
        open_shard(tmp_path, language="mt", split="train", vocab_size=300)

    tokens, offsets = tmp_path / "mt.train.tokens", tmp_path / "mt.train.offsets"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=f"{offsets} is damaged: it ends at token 7, mt.train.tokens has 6"):
        open_it()
    tokens.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"{tokens} is damaged"):
        open_it()
    tokens.unlink()
    with pytest.raises(DataError, match=f"{tokens} is missing"):
        open_it()


def _write_what_does_not_fit(folder: Path) -> None:
    with ShardWriter(folder, vocab_size=300, bos_id=0, eos_id=1) as writer:
        writer.add([5], language="mt", split="train")
        writer.add([70_000], language="mt", split="train")


def test_nothing_is_complete_when_the_writer_fails(tmp_path: Path) -> None:
    with pytest.raises(OverflowError):
        _write_what_does_not_fit(tmp_path)
    assert not (tmp_path / "mt.train.offsets").exists()
