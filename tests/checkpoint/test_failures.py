"""A save that fails or is killed leaves the last good checkpoint, and every rank has the real error."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankError, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from amalthea.checkpoint.store import find_newest, load, save
from amalthea.core.errors import CheckpointError
from amalthea.core.world import World

ROWS = 64
COLUMNS = 1024  # 256 KiB in all


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    """One sharded tensor and one small plain one."""
    whole = torch.full((ROWS, COLUMNS), float(step))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = distribute_tensor(whole, mesh, [Shard(0)])
    return {"w": whole, "b": torch.arange(9.0) + step}


def save_step(world: World, run_dir: Path, step: int, keep: int = 9) -> Path:
    return save(run_dir, step=step, tensors=tensors_at(step), progress={"step": step}, world=world, keep=keep)


def loaded_step(run_dir: Path) -> int | None:
    """The step that a resume would go on from, with every value checked."""
    found = find_newest(run_dir)
    if found.path is None:
        return None
    tensors = {"w": torch.zeros(ROWS, COLUMNS), "b": torch.zeros(9)}
    assert load(found.path, tensors) == {"step": found.step}
    assert torch.equal(tensors["w"], torch.full((ROWS, COLUMNS), float(found.step or 0)))
    return found.step


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The system refuses to let this process's files grow beyond `num_bytes` (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FileEvents:
    """Calls `action` before the n-th file operation of this process below `folder`; counts them all."""

    def __init__(self, folder: Path, action: Callable[[int, str], None]) -> None:
        self.folder, self.action, self.count, self.armed = str(folder), action, 0, True
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[object, ...]) -> None:
        if not self.armed or event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            return
        if str(args[0]).startswith(self.folder):
            self.armed = False  # what the action does is not counted
            self.action(self.count, str(args[0]))
            self.count += 1
            self.armed = True


# --- killed ---


def save_dying_at(world: World, run_dir: Path, event: int | None, step: int, keep: int) -> int:
    """Save, and be killed before file operation number `event`; without one, return how many there are."""

    def die(count: int, _path: str) -> None:
        if count == event:
            os.kill(os.getpid(), signal.SIGKILL)

    events = FileEvents(run_dir, die)
    save_step(world, run_dir, step, keep)
    events.armed = False
    return events.count


@pytest.mark.parametrize("step", [2, 1], ids=["another step", "the same step"])
def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path: Path, step: int) -> None:
    start = tmp_path / "start"
    save_step(World(), start, 1)
    (num_events,) = run_ranks(1, save_dying_at, shutil.copytree(start, tmp_path / "whole"), None, step, 1)
    newest = []
    for event in range(num_events):
        run_dir = shutil.copytree(start, tmp_path / f"at_{event}")
        with pytest.raises(RankError, match="the process died"):
            run_ranks(1, save_dying_at, run_dir, event, step, 1)
        newest.append(loaded_step(run_dir))
        save_step(World(), run_dir, 3, keep=1)
        assert names_in(run_dir) == ["step_3"], f"cleaned after a kill before file operation {event}"
        assert loaded_step(run_dir) == 3
    num_before = newest.count(1)
    assert newest == [1] * num_before + [step] * (num_events - num_before)
    assert num_before > 8, "making the folder, opening five files, renaming two"
    assert step == 1 or num_before < num_events, "the old checkpoint is removed after the new one is whole"


def save_dying_in_a_file(world: World, run_dir: Path, rank: int) -> None:
    """The system kills the rank in the middle of writing its data (SIGXFSZ, not handled)."""
    save_step(world, run_dir, 1)
    if world.rank == rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    save_step(world, run_dir, 2)


def test_a_rank_killed_in_the_middle_of_its_file_leaves_the_previous_one(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 .* the process died"):
        run_ranks(2, save_dying_in_a_file, tmp_path, 1)
    half_written = tmp_path / "checkpoints" / "step_2.tmp" / "__1_0.distcp"
    assert half_written.stat().st_size == 50_000
    assert loaded_step(tmp_path) == 1
    assert [skipped.path.name for skipped in find_newest(tmp_path).skipped] == ["step_2.tmp"]
    run_ranks(2, save_step, tmp_path, 3)
    assert names_in(tmp_path) == ["step_1", "step_3"]


# --- refused by the disk ---


def save_where_one_rank_fails(world: World, run_dir: Path, rank: int) -> tuple[str, int | None]:
    """The message of the failed save of step 2, and the step that is newest after saving step 3."""
    save_step(world, run_dir, 1)
    limit = 30_000 if world.rank == rank else resource.RLIM_INFINITY
    with file_size_limit(limit), pytest.raises(CheckpointError) as caught:
        save_step(world, run_dir, 2)
    assert not (run_dir / "checkpoints" / "step_2.tmp").exists()
    newest = find_newest(run_dir).step
    save_step(world, run_dir, 3)
    return str(caught.value), newest


@pytest.mark.case(19)
@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_of_four_fails_and_all_raise_its_error(tmp_path: Path, rank: int) -> None:
    results = run_ranks(4, save_where_one_rank_fails, tmp_path, rank)
    assert len(set(results)) == 1
    message, newest = results[0]
    last = tmp_path / "checkpoints" / "step_1"
    assert message == (
        f"cannot save {tmp_path / 'checkpoints' / 'step_2'}: rank {rank}: [Errno {errno.EFBIG}] File too large; "
        f"the last good checkpoint, {last}, is untouched"
    )
    assert newest == 1
    assert names_in(tmp_path) == ["step_1", "step_3"]
    assert loaded_step(tmp_path) == 3


@pytest.mark.case(19)
@pytest.mark.parametrize("file", [".metadata", "progress.json"])
def test_failing_in_the_last_files_is_the_same(tmp_path: Path, file: str) -> None:
    """A limit that the data passes, and either the metadata (of a very long name) or the progress does not."""
    path = save_step(World(), tmp_path, 1)
    tensors = {"n" * (9000 if file == ".metadata" else 9): torch.zeros(1)}
    progress = {"note": "x" * (9000 if file == "progress.json" else 9)}
    with file_size_limit(5000), pytest.raises(CheckpointError, match="File too large") as caught:
        save(tmp_path, step=2, tensors=tensors, progress=progress, world=World(), keep=1)
    assert str(path) in str(caught.value)
    assert names_in(tmp_path) == ["step_1"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system needs root; the file-size tests cover the same path")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def save_too_much(world: World, run_dir: Path) -> str:
    save_step(world, run_dir, 1)
    tensors = tensors_at(2)
    tensors["big"] = torch.zeros(1024, 512)
    with pytest.raises(CheckpointError) as caught:
        save(run_dir, step=2, tensors=tensors, progress={}, world=world, keep=1)
    return str(caught.value)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_too_little_room_is_found_before_writing(small_disk: Path, num_ranks: int) -> None:
    messages = run_ranks(num_ranks, save_too_much, small_disk)
    assert len(set(messages)) == 1
    needed_bytes = 4 * (ROWS * COLUMNS + 9 + 1024 * 512) + 2048 * (num_ranks + 2)
    assert f"{small_disk / 'checkpoints'} needs 2.3 MiB ({needed_bytes} bytes) and has" in messages[0]
    assert f"({shutil.disk_usage(small_disk).free} bytes) free; make room or keep fewer" in messages[0]
    assert "step_1, is untouched" in messages[0]
    assert names_in(small_disk) == ["step_1"]
    assert loaded_step(small_disk) == 1


def save_while_another_fills_the_disk(world: World, run_dir: Path) -> str:
    """There is room when the save begins; it is gone when rank 1 opens its file."""
    save_step(world, run_dir, 1)

    def fill(_count: int, path: str) -> None:
        if path.endswith("__1_0.distcp"):
            with (run_dir / "filler").open("wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(run_dir).free - 65_536)

    events = FileEvents(run_dir, fill)
    with pytest.raises(CheckpointError) as caught:
        save_step(world, run_dir, 2)
    events.armed = False
    return str(caught.value)


@pytest.mark.case(19)
def test_a_disk_that_fills_up_meanwhile(small_disk: Path) -> None:
    messages = run_ranks(2, save_while_another_fills_the_disk, small_disk)
    assert messages[0] == messages[1]
    real = rf"(rank|ranks 0,) 1: \[Errno {errno.ENOSPC}\] No space left on device;"  # rank 0 may be late as well
    assert re.search(real, messages[0]), messages[0]
    assert "step_1, is untouched" in messages[0]
    assert names_in(small_disk) == ["step_1"]
    assert loaded_step(small_disk) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"File exists.*there is no earlier checkpoint"):
        save_step(World(), tmp_path, 1)
