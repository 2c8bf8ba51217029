"""Save, find and load checkpoints: flat tables of tensors by name, exact under any mesh and number of ranks.

All three are collective over the default process group, where there is one: every rank calls them with the same
arguments, and either all return or all raise the same CheckpointError. Without a process group they work in
this process alone. See `folder` for what lies on disk.

Tensors are DTensors (each rank holds a shard), `Pieces` (each rank holds blocks) or plain tensors that are equal on
every rank; a plain tensor that differs between ranks is refused, because only one rank's values would survive.
"""

from __future__ import annotations

import json
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from amalthea.checkpoint import folder
from amalthea.checkpoint.agree import (
    Failures,
    attempt,
    describe,
    gather,
    gather_failures,
    group_rank,
    in_group,
    on_main,
)
from amalthea.checkpoint.folder import FileRecord, Found, Record
from amalthea.checkpoint.storage import HashingWriter, SafeReader, read_metadata, staging_bytes
from amalthea.core.errors import CheckpointError
from amalthea.core.pieces import Pieces
from amalthea.core.units import format_bytes
from amalthea.core.world import World

__all__ = ["Found", "check_staging", "find_newest", "load", "save"]


def save(
    run_dir: Path,
    *,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    progress: dict[str, Any],
    world: World,
    keep: int,
    host_bytes: int | None = None,
) -> Path:
    """Write the checkpoint of `step` and return its folder, which appears under its name only once it is whole.

    A checkpoint of the same step is replaced. Of the completed ones up to `step`, the newest `keep` stay.

    Args:
        tensors: Name → tensor (global shapes are what counts): DTensors, or plain tensors equal on all ranks.
        progress: What else to come back to, as JSON takes it; rank 0's is kept.
        host_bytes: Host memory that this rank may take, none where nobody asked; see `check_staging`.

    Raises:
        CheckpointError: Not enough room on disk or in host memory, found out before writing; or writing failed on
            some rank, with that rank's error. The unfinished folder is gone and earlier checkpoints are as they were.

    Communication: gathers of small objects over all ranks, a few per save; tensors are not sent.
    Memory: one tensor's shard at a time on the host.
    """
    target = folder.step_folder(run_dir, step)
    _, failures = on_main(lambda: _prepare(target))
    _stop_if(failures, target)
    if host_bytes is not None:
        _, failures = attempt(lambda: check_staging(tensors, host_bytes=host_bytes))
        _stop_if(gather_failures(failures), target)
    _stop_if(_differing(tensors), target)

    written, failures = attempt(lambda: _write(folder.temporary(target), tensors))
    files: dict[str, FileRecord] = {}
    for of_rank, failures_of_rank in gather((written or {}, failures)):
        files |= of_rank
        failures |= failures_of_rank
    _stop_if(failures, target)

    record = Record(step=step, torch_version=torch.__version__, num_ranks=world.size, files=files)
    _, failures = on_main(lambda: folder.commit(target, record=record, progress=progress))
    _stop_if(failures, target)
    on_main(lambda: folder.drop_older(target.parent, step=step, keep=keep))
    return target


def check_staging(tensors: Mapping[str, torch.Tensor], *, host_bytes: int) -> None:
    """Whether `host_bytes` of host memory suffice for this rank to write `tensors`; asked before the first step, so
    that a run does not find out at its first save. Communication: none. Raises CheckpointError."""
    needed_bytes = staging_bytes(tensors.values())
    if needed_bytes > host_bytes:
        raise CheckpointError(
            f"saving stages up to {format_bytes(needed_bytes)} in host memory per rank, and {format_bytes(host_bytes)} "
            "is free; lower memory.offload_budget_gib, start fewer ranks on a node, or shard over more ranks"
        )


def find_newest(run_dir: Path) -> Found:
    """Find the newest whole checkpoint of a run; every file of a candidate is read once, by one of the ranks.

    Returns:
        Its folder and step, and every newer folder that is not whole, with the reason. `path` is None where
        none is whole; `skipped` is empty as well where there is none at all.

    Raises:
        CheckpointError: The run folder cannot be listed.

    Communication: one broadcast, and one gather of small objects per candidate.
    """
    num_ranks = dist.get_world_size() if in_group() else 1

    def damage(path: Path) -> str | None:
        reasons = gather(folder.first_damage(path, share=group_rank(), num_shares=num_ranks))
        return next((reason for reason in reasons if reason is not None), None)

    paths, failures = on_main(lambda: folder.candidates(folder.checkpoints_folder(run_dir)))
    if paths is None:
        raise CheckpointError(f"cannot look for checkpoints in {run_dir}: {describe(failures)}")
    return folder.newest_whole(paths, damage)


def load(path: Path, tensors: Mapping[str, torch.Tensor], *, strict: bool = True) -> dict[str, Any]:
    """Fill `tensors` in place from the checkpoint folder `path` and return the progress saved with them.

    Placements, mesh and number of ranks may differ from those of the save; values are exact.

    Args:
        strict: Names must match both ways, and dtypes too. Otherwise tensors that the checkpoint has and
            `tensors` has not are left out (a model without its optimizer) and values are cast.

    Raises:
        CheckpointError: Names, shapes or dtypes do not match (nothing is changed then), or a file cannot be
            read, or the metadata asks for more than tensors. Checksums are `find_newest`'s work.

    Communication: gathers of small objects over all ranks.
    Memory: one saved piece at a time on the host.
    """

    def check() -> dict[str, Any]:
        folder.read_record(path)
        _check_names(path, read_metadata(path), tensors, strict=strict)
        return json.loads((path / folder.PROGRESS).read_text(encoding="utf-8"))

    def read() -> None:
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _quiet():
            dcp.load(detached, storage_reader=SafeReader(path), planner=planner, no_dist=not in_group())

    progress, failures = attempt(check)
    if not (failures := gather_failures(failures)):
        _, failures = attempt(read)
        failures = gather_failures(failures)
    if failures:
        raise CheckpointError(f"cannot load {path}: {describe(failures)}")
    assert progress is not None
    return progress


def _prepare(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.clean_up(target.parent)
    folder.temporary(target).mkdir()


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, FileRecord]:
    """Write this rank's part into `path` and return the files it wrote."""
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = HashingWriter(path)
    with _quiet():
        dcp.save(detached, storage_writer=writer, planner=planner, no_dist=not in_group())
    return writer.files


def _stop_if(failures: Failures, target: Path) -> None:
    """Where anything failed: remove the unfinished folder, and raise on every rank once it is gone."""
    if not failures:
        return

    def clean() -> Path | None:
        shutil.rmtree(folder.temporary(target), ignore_errors=True)
        return folder.last_recorded(target.parent)

    last, _ = on_main(clean)
    rest = f"the last good checkpoint, {last}, is untouched" if last else "there is no earlier checkpoint"
    raise CheckpointError(f"cannot save {target}: {describe(failures)}; {rest}")


def _differing(tensors: Mapping[str, torch.Tensor]) -> Failures:
    """Plain tensors that are not the same on all ranks: saved under one name, all but one rank's would be lost."""
    if not in_group() or dist.get_world_size() == 1:
        return {}
    digests, failures = attempt(
        lambda: {name: _digest(tensor) for name, tensor in tensors.items() if not isinstance(tensor, (DTensor, Pieces))}
    )
    if failures := gather_failures(failures):
        return failures
    if len(set(gather(zlib.crc32(repr(digests).encode())))) == 1:
        return {}
    first_with: dict[str, tuple[int, str]] = {}
    for rank, of_rank in enumerate(gather(digests or {})):
        for name, digest in of_rank.items():
            owner, expected = first_with.setdefault(name, (rank, digest))
            if digest != expected:
                why = f"{name} is another than on rank {owner} and no DTensor, so one of the two would be lost"
                failures.setdefault(rank, why)
    return failures


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(data):08x}"


def _check_names(path: Path, metadata: Metadata, tensors: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    saved: dict[str, Any] = metadata.state_dict_metadata
    problems = []
    if missing := sorted(tensors.keys() - saved.keys()):
        problems.append(f"it lacks {_some(missing)}")
    if strict and (unexpected := sorted(saved.keys() - tensors.keys())):
        problems.append(f"it has, and this run does not, {_some(unexpected)}")
    both = sorted(tensors.keys() & saved.keys())
    if other_shape := [name for name in both if saved[name].size != tensors[name].shape]:
        shapes = (f"{name} {tuple(saved[name].size)} for {tuple(tensors[name].shape)}" for name in other_shape)
        problems.append(f"it has other shapes: {_some(list(shapes))}")
    if strict and (other_dtype := [n for n in both if saved[n].properties.dtype != tensors[n].dtype]):
        dtypes = (f"{name} {saved[name].properties.dtype} for {tensors[name].dtype}" for name in other_dtype)
        problems.append(f"it has other dtypes: {_some(list(dtypes))}")
    if problems:
        raise CheckpointError(
            f"{'; '.join(problems)}; use the model and optimizer that it was saved with (config.json of its run), "
            "or start a new run folder"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that it works in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to .* in a single process")
        yield
