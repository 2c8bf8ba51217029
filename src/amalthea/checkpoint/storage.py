"""torch.distributed.checkpoint's files, written with checksums and read without running code from them.

The writer hashes bytes on their way out, so a checksum says what was meant to be on disk, and nothing is read
back. The reader opens `.metadata`, which is a pickle, with an unpickler that knows only what such a file needs.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from amalthea.checkpoint.folder import FileRecord
from amalthea.core.errors import CheckpointError
from amalthea.core.pieces import Pieces
from amalthea.core.tensors import local_tensor
from amalthea.core.units import format_bytes

METADATA = ".metadata"
_ITEM_OVERHEAD_BYTES = 2048
"""Headers per piece of a tensor, in its file and in the metadata (measured: 1.6 KB)."""


def staging_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Host memory that writing this rank's parts takes at most: the largest of them, since they go one at a time.

    On a CPU the same bound holds: a part is copied there where it is a view into something larger.
    """
    parts = (part.numel() * part.element_size() for tensor in tensors for part in _parts(tensor))
    return max(parts, default=0)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(tensor, Pieces):
        return [piece.tensor for piece in tensor.pieces]
    return [local_tensor(tensor)]


class HashingWriter(FileSystemWriter):
    """Writes one file per rank, synced to disk; `files` has the size and checksum of those that this rank wrote.

    Raises (inside torch's agreement, so that every rank sees it):
        CheckpointError: There is less free space than all ranks need, found out before anything is written.
        OSError: The first one that writing met, and not what it led to.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        self.fs: _HashingFileSystem = _HashingFileSystem()

    @property
    def files(self) -> dict[str, FileRecord]:
        return self.fs.files

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        needed_bytes = sum(_plan_bytes(plan) for plan in plans)
        free_bytes = shutil.disk_usage(self.path).free
        if needed_bytes > free_bytes:
            raise CheckpointError(
                f"{self.path.parent} needs {format_bytes(needed_bytes)} ({needed_bytes} bytes) and has "  # type: ignore[union-attr]
                f"{format_bytes(free_bytes)} ({free_bytes} bytes) free; make room or keep fewer checkpoints"
            )
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            written = self._write_file(plan, planner)
        except Exception as error:
            raise _plain(self.fs.error or error) from None
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """One tensor after the other: torch's own loop keeps all that it copied to the host until the file is done."""
        name = f"{plan.storage_data.prefix}0{filesystem.DEFAULT_SUFFIX}"
        path = self.fs.concat_path(self.path, name)
        with self.fs.create_stream(path, "wb") as stream:
            written = [
                filesystem._write_item(
                    self.transforms, stream, _on_host(planner.resolve_data(item)), item, name, self.serialization_format
                )
                for item in plan.items
            ]
            stream.flush()
            os.fsync(stream.fileno())
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            super().finish(metadata, results)
        except Exception as error:
            raise _plain(self.fs.error or error) from None

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # no path: a checkpoint may be moved


def _on_host(data: object) -> torch.Tensor:
    """A tensor of its own size: what is saved of a view is all that it looks into."""
    assert isinstance(data, torch.Tensor), "only tensors are saved"
    tensor = data.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _plan_bytes(plan: SavePlan) -> int:
    total = 0
    for item in plan.items:
        assert item.tensor_data is not None, "only tensors are saved"
        total += prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
    return total + _ITEM_OVERHEAD_BYTES * len(plan.items)


def _plain(error: Exception) -> Exception:
    """An error of the same words that pickles on every rank."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename)
    return CheckpointError(f"{type(error).__name__}: {error}")


class _HashingFileSystem(filesystem.FileSystem):
    """Hashes what is written, and remembers the first error of the disk."""

    def __init__(self) -> None:
        self.files: dict[str, FileRecord] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode
        try:
            with Path(path).open(mode) as raw:
                stream = _HashingStream(raw, self)
                yield stream  # type: ignore[misc]
                raw.close()  # flushes; an error here is one of writing
        except OSError as error:
            self.error = self.error or error
            raise
        self.files[Path(path).name] = FileRecord(stream.num_bytes, f"{stream.crc32:08x}")

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _HashingStream:
    """The part of a binary file that torch writes through."""

    def __init__(self, raw: io.BufferedIOBase, file_system: _HashingFileSystem) -> None:
        self._raw, self._file_system = raw, file_system
        self.num_bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        try:
            written = self._raw.write(data)
        except OSError as error:  # torch's zip writer would replace it by "unexpected pos"
            self._file_system.error = self._file_system.error or error
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        self.num_bytes += written
        return written

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()


class SafeReader(FileSystemReader):
    """Reads tensors only; `.metadata` was read, and refused where it asks for anything else, by `read_metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_metadata(path: Path) -> Metadata:
    """Where every tensor of the checkpoint folder `path` lies.

    Raises:
        CheckpointError: The file is missing, damaged, or holds anything but the description of tensors.
    """
    try:
        with (path / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not _describes_tensors(metadata):
            raise CheckpointError("it describes something else than tensors")
    except CheckpointError as error:
        raise CheckpointError(f"{path / METADATA} was refused: {error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path / METADATA} cannot be read: {type(error).__name__}: {error}") from None
    return metadata


def _describes_tensors(metadata: Any) -> bool:
    """Anything that is not a tensor would be read with a full unpickler; a path that leads out would be followed."""
    if not isinstance(metadata, Metadata):
        return False
    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    return (
        isinstance(tensors, dict)
        and isinstance(places, dict)
        and all(isinstance(entry, TensorStorageMetadata) for entry in tensors.values())
        and all(
            isinstance(place, filesystem._StorageInfo) and Path(place.relative_path).name == place.relative_path
            for place in places.values()
        )
    )


_NEEDED = {
    (value.__module__, value.__qualname__): value
    for value in (
        dcp_metadata.Metadata,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.TensorProperties,
        dcp_metadata._MEM_FORMAT_ENCODING,
        dcp_metadata.MetadataIndex,
        dcp_metadata.StorageMeta,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
}


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that describe tensors, torch.Size and dtypes, and nothing that could act."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        known = _NEEDED.get((module_name, global_name))
        if known is not None:
            return known
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        raise CheckpointError(
            f"it asks to load {module_name}.{global_name}, which no checkpoint needs; "
            "do not load checkpoints from people you do not trust"
        )
