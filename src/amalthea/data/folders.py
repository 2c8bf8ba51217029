"""Folders that are either whole or absent: written aside, checked by their files' checksums, renamed into place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amalthea.core.errors import DataError

MANIFEST = "manifest.json"


def file_sha256(path: Path) -> str:
    """Checksum of a file's content, in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_checksum(checksums: dict[str, str]) -> str:
    """One checksum for named files, whatever their order."""
    return hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_manifest(folder: Path, *, kind: str) -> dict[str, Any]:
    """The manifest of a folder of this `kind`.

    Raises DataError when it is missing, unreadable or of another kind.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} holds no {MANIFEST}: it is no folder of {kind}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); delete {folder} to have it made again") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        found = manifest.get("kind") if isinstance(manifest, dict) else type(manifest).__name__
        raise DataError(f"{path} describes {found!r}, expected {kind!r}")
    return manifest


def check_files(folder: Path, files: dict[str, dict[str, Any]], *, checksums: bool = True) -> None:
    """Compare files with the `bytes` and `sha256` that a manifest gives them.

    Raises DataError naming the first file that is missing or differs.
    """
    remedy = f"delete {folder} to have it made again"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing; {remedy}")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise DataError(f"{path} is damaged: {size} bytes, expected {expected['bytes']}; {remedy}")
        if checksums and file_sha256(path) != expected["sha256"]:
            raise DataError(f"{path} is damaged: its checksum differs from {folder / MANIFEST}; {remedy}")


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """`bytes` and `sha256` of each file of a folder, for its manifest."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    return {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in paths}


@contextmanager
def written_aside(target: Path, *, is_whole: Callable[[Path], bool]) -> Iterator[Path]:
    """A new folder beside `target` that takes its name when the block ends well, and vanishes otherwise.

    When a whole `target` is there by then, made by another process, that one stays; a damaged one is replaced.
    Raises DataError when the disk refuses.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise DataError(f"{target.parent} cannot be written: {error.strerror or error}") from None
    try:
        yield aside
        _rename(aside, target, is_whole=is_whole)
    except OSError as error:
        raise DataError(f"{target} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rename(aside: Path, target: Path, *, is_whole: Callable[[Path], bool]) -> None:
    aside.chmod(0o755)
    while not is_whole(target):
        if target.exists():
            damaged = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
            os.replace(target, damaged)
            shutil.rmtree(damaged)
        try:
            aside.rename(target)
            return
        except OSError:
            if not target.exists():
                raise
