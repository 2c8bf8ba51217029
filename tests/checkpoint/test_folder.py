"""What counts as whole, what is kept, and what is refused; one process."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.checkpoint import metadata as dcp_metadata

from amalthea.checkpoint.store import find_newest, load, save
from amalthea.core.errors import CheckpointError
from amalthea.core.world import World


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((50, 4), float(step)), "b": torch.arange(9.0) + step}


def save_step(run_dir: Path, step: int, *, keep: int = 9, world: World | None = None) -> Path:
    return save(
        run_dir,
        step=step,
        tensors=tensors_at(step),
        progress={"step": step},
        world=world or World(),
        keep=keep,
    )


def load_step(path: Path) -> int:
    """The step whose values lie in `path`, every value checked."""
    tensors = tensors_at(-1)
    step = load(path, tensors)["step"]
    assert all(torch.equal(tensor, tensors_at(step)[name]) for name, tensor in tensors.items())
    return step


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


def test_nothing_there(tmp_path: Path) -> None:
    for run_dir in (tmp_path, tmp_path / "never made"):
        found = find_newest(run_dir)
        assert (found.path, found.step, found.skipped) == (None, None, ())


def test_newest_is_by_number_and_older_ones_go(tmp_path: Path) -> None:
    for step in (8, 9, 10):
        save_step(tmp_path, step, keep=2)
    assert names_in(tmp_path) == ["step_10", "step_9"]
    found = find_newest(tmp_path)
    assert (found.step, found.skipped) == (10, ())
    assert found.path is not None
    assert load_step(found.path) == 10


def test_going_back_does_not_remove_what_was_just_saved(tmp_path: Path) -> None:
    save_step(tmp_path, 5)
    (save_step(tmp_path, 10) / "progress.json").unlink()
    assert find_newest(tmp_path).step == 5
    save_step(tmp_path, 6, keep=1)
    assert names_in(tmp_path) == ["step_10", "step_6"]
    assert find_newest(tmp_path).step == 6


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    save(tmp_path, step=1, tensors={"w": torch.ones(2)}, progress={"again": True}, world=World(), keep=1)
    tensors = {"w": torch.zeros(2)}
    assert load(path, tensors) == {"again": True}
    assert tensors["w"].tolist() == [1, 1]
    assert names_in(tmp_path) == ["step_1"]


def test_a_replaced_checkpoint_whose_successor_never_came_is_whole_and_returns(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    path.rename(path.with_name("step_1.old"))
    path.with_name("step_1.tmp").mkdir()
    found = find_newest(tmp_path)
    assert found.step == 1
    assert found.path is not None
    assert load_step(found.path) == 1
    save_step(tmp_path, 2)
    assert names_in(tmp_path) == ["step_1", "step_2"]


def test_every_kind_of_leftover_of_one_step_goes(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    shutil.copytree(path, path.with_name("step_1.old"))
    shutil.copytree(path, path.with_name("step_1.tmp"))
    save_step(tmp_path, 2)
    assert names_in(tmp_path) == ["step_1", "step_2"]


def test_leftovers_are_reported_and_then_cleaned(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    leftover = tmp_path / "checkpoints" / "step_2.tmp"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    found = find_newest(tmp_path)
    assert found.step == 1
    assert [(skipped.path, skipped.reason) for skipped in found.skipped] == [(leftover, "it was never finished")]
    save_step(tmp_path, 3)
    assert names_in(tmp_path) == ["step_1", "step_3"]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "notes.tmp").mkdir(parents=True)
    save_step(tmp_path, 1)
    assert names_in(tmp_path) == ["notes.tmp", "step_1"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "progress.json", "complete.json"])
@pytest.mark.parametrize("harm", ["truncated", "one bit", "missing", "empty"])
def test_any_damage_to_any_file_is_found(tmp_path: Path, name: str, harm: str) -> None:
    save_step(tmp_path, 1)
    file = save_step(tmp_path, 2) / name
    num_bytes = file.stat().st_size
    if harm == "truncated":
        os.truncate(file, num_bytes - 1)
    elif harm == "one bit":
        flip_bit(file, random.Random(name).randrange(num_bytes))
    elif harm == "missing":
        file.unlink()
    else:
        file.write_bytes(b"")
    found = find_newest(tmp_path)
    assert found.step == 1, f"{name} {harm}"
    (skipped,) = found.skipped
    assert skipped.path.name == "step_2"
    if name != "complete.json":
        words = {
            "truncated": f"{name} has {num_bytes - 1} bytes instead of {num_bytes}",
            "one bit": f"{name} is damaged: its checksum is",
            "missing": f"{name} is missing",
            "empty": f"{name} has 0 bytes instead of {num_bytes}",
        }
        assert words[harm] in skipped.reason


def test_every_bit_of_the_record_counts_or_does_not_matter(tmp_path: Path) -> None:
    """A flipped bit in complete.json never makes another checkpoint of it: it is found, or changes nothing."""
    save_step(tmp_path, 1)
    path = save_step(tmp_path, 2)
    record = path / "complete.json"
    whole = record.read_bytes()
    for position in range(0, len(whole), 3):
        flip_bit(record, position)
        found = find_newest(tmp_path)
        assert found.path is not None
        assert load_step(found.path) == found.step
        record.write_bytes(whole)


def test_nothing_whole_gives_every_reason(tmp_path: Path) -> None:
    for step in (1, 2):
        (save_step(tmp_path, step) / "__0_0.distcp").unlink()
    found = find_newest(tmp_path)
    assert found.path is None
    assert [skipped.path.name for skipped in found.skipped] == ["step_2", "step_1"]
    assert all("__0_0.distcp is missing" in skipped.reason for skipped in found.skipped)


def save_and_flip(world: World, run_dir: Path, rank_of_file: int) -> tuple[int | None, str]:
    save_step(run_dir, 1, world=world)
    path = save_step(run_dir, 2, world=world)
    if world.is_main:
        flip_bit(path / f"__{rank_of_file}_0.distcp", 100)
    torch.distributed.barrier()
    found = find_newest(run_dir)
    return found.step, found.skipped[0].reason


@pytest.mark.parametrize("rank_of_file", [0, 1])
def test_ranks_share_the_check_and_agree(tmp_path: Path, rank_of_file: int) -> None:
    results = run_ranks(2, save_and_flip, tmp_path, rank_of_file)
    assert results[0] == results[1]
    step, reason = results[0]
    assert step == 1
    assert f"__{rank_of_file}_0.distcp is damaged" in reason


def test_a_newer_format_says_so(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    record = json.loads((path / "complete.json").read_text())
    (path / "complete.json").write_text(json.dumps(record | {"format": 2}))
    with pytest.raises(CheckpointError, match="format 2; this version reads format 1: use the version"):
        load(path, tensors_at(0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": None}, "it has, and this run does not, b;"),
        ({"c": torch.zeros(1)}, "it lacks c;"),
        ({"b": torch.zeros(8)}, r"other shapes: b \(9,\) for \(8,\);"),
        ({"b": torch.zeros(9, dtype=torch.bfloat16)}, "other dtypes: b torch.float32 for torch.bfloat16;"),
        ({f"n{i}": torch.zeros(1) for i in range(7)}, "it lacks n0, n1, n2, n3, n4 and 2 more;"),
    ],
)
def test_names_shapes_and_dtypes_must_match(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = save_step(tmp_path, 1)
    tensors = {name: tensor for name, tensor in (tensors_at(2) | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=words) as caught:
        load(path, tensors)
    assert str(path) in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(tensors["w"], tensors_at(2)["w"]), "nothing is loaded where anything does not fit"


def test_not_strict_takes_a_part_and_casts_but_never_leaves_a_hole(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    part = {"b": torch.zeros(9, dtype=torch.bfloat16)}
    load(path, part, strict=False)
    assert part["b"].tolist() == (torch.arange(9.0) + 1).tolist()
    with pytest.raises(CheckpointError, match="it lacks c;"):
        load(path, part | {"c": torch.zeros(1)}, strict=False)


def test_progress_that_is_not_json_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"Object of type \w*Path is not JSON"):
        save(tmp_path, step=2, tensors=tensors_at(2), progress={"p": tmp_path}, world=World(), keep=1)
    assert names_in(tmp_path) == ["step_1"]


class Evil:
    """Would leave a file behind if anything ran it."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sentinel),)


def evil_metadata(path: Path, sentinel: Path, how: str) -> bytes:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    if how == "a call":
        return pickle.dumps(Evil(sentinel))
    if how == "a call inside":
        metadata.planner_data = Evil(sentinel)
    elif how == "bytes, which torch would unpickle":
        metadata.state_dict_metadata["w"] = dcp_metadata.BytesStorageMetadata()
    elif how == "a file outside":
        next(iter(metadata.storage_data.values())).relative_path = "../../elsewhere"
    elif how == "a dotted name":
        return b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93."
    elif how == "something else":
        return pickle.dumps({"w": 1})
    else:
        return b"not a pickle"
    return pickle.dumps(metadata)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("a call", "refused: it asks to load posix.mkdir"),
        ("a call inside", "refused: it asks to load posix.mkdir"),
        ("bytes, which torch would unpickle", "refused: it asks to load .*BytesStorageMetadata"),
        ("a file outside", "refused: it describes something else than tensors"),
        ("a dotted name", "refused: it asks to load torch.os.system"),
        ("something else", "refused: it describes something else than tensors"),
        ("not a pickle", "cannot be read: UnpicklingError"),
    ],
)
def test_metadata_that_would_act_is_refused(tmp_path: Path, how: str, words: str) -> None:
    path = save_step(tmp_path, 1)
    sentinel = tmp_path / "it ran"
    (path / ".metadata").write_bytes(evil_metadata(path, sentinel, how))
    with pytest.raises(CheckpointError, match=words):
        load(path, tensors_at(0))
    assert not sentinel.exists()
    if how == "a call":  # the file does what it is meant to where it is trusted, or this test shows nothing
        pickle.loads((path / ".metadata").read_bytes())
        assert sentinel.exists()


def test_tensor_data_that_would_act_is_refused(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    sentinel = tmp_path / "it ran"
    torch.save(Evil(sentinel), path / "__0_0.distcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, (path / "__0_0.distcp").stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        load(path, tensors_at(0))
    assert not sentinel.exists()
