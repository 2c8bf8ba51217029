"""The folder of a run's checkpoints: names, the record that makes one whole, checks, clean-up. No tensors here.

    RUN/checkpoints/
      step_200/               whole: it was complete before it got this name
        __0_0.distcp …        tensors, one file per rank
        .metadata             which tensor lies where (torch.distributed.checkpoint)
        progress.json         where the run was
        complete.json         the *record*: every file above with its size and checksum; written last
      step_300.tmp/           being written, or left by a run that was killed: removed by the next save
      step_300.old/           the former step_300 while a new one takes its name; whole as well

A checkpoint is *whole* if its record can be read and every file in it has its size and checksum.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amalthea.core.errors import CheckpointError

RECORD = "complete.json"
PROGRESS = "progress.json"
FORMAT = 1
_NAME = re.compile(r"step_(\d+)(\.old|\.tmp)?")
_READ_BYTES = 8 * 1024**2


@dataclass(frozen=True)
class FileRecord:
    """Size and CRC-32 of one file of a checkpoint."""

    num_bytes: int
    crc32: str


@dataclass(frozen=True)
class Record:
    """What complete.json says."""

    step: int
    torch_version: str
    num_ranks: int
    files: dict[str, FileRecord]
    format: int = FORMAT


@dataclass(frozen=True)
class Skipped:
    """A folder that is not a whole checkpoint, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint, if there is one, and every newer folder that was passed over."""

    path: Path | None
    step: int | None
    skipped: tuple[Skipped, ...] = ()


def checkpoints_folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def step_folder(run_dir: Path, step: int) -> Path:
    return checkpoints_folder(run_dir) / f"step_{step}"


def temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def candidates(folder: Path) -> list[Path]:
    """Every checkpoint folder in RUN/checkpoints, newest step first; of one step: itself, `.old`, `.tmp`."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    rank_of_suffix = {"": 0, ".old": 1, ".tmp": 2}
    return sorted(named, key=lambda path: (-step_of(path), rank_of_suffix[path.suffix]))


def last_recorded(folder: Path) -> Path | None:
    """The newest checkpoint that was completed, without reading its files."""
    recorded = (path for path in candidates(folder) if path.suffix != ".tmp" and (path / RECORD).is_file())
    return next(recorded, None)


def read_record(path: Path) -> Record:
    """Read complete.json.

    Raises:
        CheckpointError: It is missing, damaged or of a newer format.
    """
    try:
        content = json.loads((path / RECORD).read_text(encoding="utf-8"))
        files = {name: FileRecord(**entry) for name, entry in content.pop("files").items()}
        record = Record(files=files, **content)
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {RECORD}: it was never finished") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path / RECORD} cannot be read: {error}") from None
    if record.format != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {record.format}; this version reads format {FORMAT}: "
            "use the version of Amalthea that wrote it"
        )
    return record


def first_damage(path: Path, *, share: int = 0, num_shares: int = 1) -> str | None:
    """Why the checkpoint is not whole, or None; only every `num_shares`-th file is read, from number `share`."""
    if path.suffix == ".tmp":
        return "it was never finished"
    try:
        record = read_record(path)
        for name in sorted(record.files)[share::num_shares]:
            _check_file(path / name, record.files[name])
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _check_file(path: Path, expected: FileRecord) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing")
    num_bytes = path.stat().st_size
    if num_bytes != expected.num_bytes:
        raise CheckpointError(f"{path.name} has {num_bytes} bytes instead of {expected.num_bytes}")
    if (crc32 := checksum(path)) != expected.crc32:
        raise CheckpointError(f"{path.name} is damaged: its checksum is {crc32} instead of {expected.crc32}")


def checksum(path: Path) -> str:
    """CRC-32 of a file, as eight hexadecimal digits; host memory: 8 MiB."""
    crc32 = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:num_bytes], crc32)
    return f"{crc32:08x}"


def clean_up(folder: Path) -> None:
    """Remove what killed runs left: unfinished folders go, a replaced checkpoint without successor returns."""
    for path in reversed(candidates(folder)):  # `.tmp` first: its name is needed to remove `.old`
        if path.suffix == ".tmp":
            shutil.rmtree(path)
        elif path.suffix == ".old":
            successor = path.with_suffix("")
            if successor.exists():
                _remove(path)
            else:
                path.rename(successor)


def commit(target: Path, *, record: Record, progress: dict[str, Any]) -> None:
    """Complete the temporary folder of `target` and give it its name; what had the name stays whole until then.

    The name changes only after every file is on disk, so a crash at any point leaves the former checkpoint or
    the new one.
    """
    temporary_path = temporary(target)
    files = dict(record.files)
    files[PROGRESS] = _write_json(temporary_path / PROGRESS, progress)
    _write_json(temporary_path / RECORD, asdict(record) | {"files": {k: asdict(v) for k, v in files.items()}})
    _sync(temporary_path)
    if target.exists():
        target.rename(_old(target))
    temporary_path.rename(target)
    _sync(target.parent)
    if _old(target).exists():
        _try_to_remove(_old(target))


def drop_older(folder: Path, *, step: int, keep: int) -> None:
    """Remove all but the newest `keep` completed checkpoints up to `step`; later ones are not touched."""
    completed = [path for path in candidates(folder) if not path.suffix and (path / RECORD).is_file()]
    for path in [path for path in completed if step_of(path) <= step][keep:]:
        _try_to_remove(path)


def _try_to_remove(path: Path) -> None:
    """What cannot go now is left for the next save, which says so: the new checkpoint is whole all the same."""
    with contextlib.suppress(OSError):
        _remove(path)


def _remove(path: Path) -> None:
    """Take away the name first: a half-removed checkpoint must not look like one."""
    doomed = path.with_name(path.name.removesuffix(".old") + ".tmp")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _write_json(path: Path, content: dict[str, Any]) -> FileRecord:
    data = json.dumps(content, indent=1).encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(num_bytes=len(data), crc32=f"{zlib.crc32(data):08x}")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def newest_whole(paths: Iterable[Path], damage: Callable[[Path], str | None]) -> Found:
    """The first of `paths` without damage, and those before it."""
    skipped: list[Skipped] = []
    for path in paths:
        reason = damage(path)
        if reason is None:
            return Found(path=path, step=step_of(path), skipped=tuple(skipped))
        skipped.append(Skipped(path, reason))
    return Found(path=None, step=None, skipped=tuple(skipped))
