"""Saving takes bounded host memory, and says beforehand where that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

from amalthea.checkpoint import store
from amalthea.checkpoint.storage import staging_bytes
from amalthea.core.errors import CheckpointError
from amalthea.core.pieces import Piece, Pieces
from amalthea.core.world import World
from amalthea.memory.tracker import StorageTracker

MIB = 1 << 20


def state() -> dict[str, torch.Tensor]:
    """40 views of 2 MiB each, which a writer has to copy, and a whole tensor, which it has not."""
    arena = torch.arange(40 * MIB // 2, dtype=torch.float32).view(40, -1)
    tensors = {f"momentum {i}": Pieces(row.shape, row.dtype, [Piece((0,), row)]) for i, row in enumerate(arena)}
    return {**tensors, "weight": torch.ones(MIB)}


@pytest.mark.case(6)
def test_a_save_stages_no_more_than_it_says(tmp_path: Path) -> None:
    tensors = state()
    assert staging_bytes(tensors.values()) == 4 * MIB
    with StorageTracker() as tracker:
        for tensor in tensors.values():
            for part in [p.tensor for p in tensor.pieces] if isinstance(tensor, Pieces) else [tensor]:
                tracker.add(part)
        before = tracker.live_bytes
        tracker.reset_peak()
        store.save(tmp_path, step=1, tensors=tensors, progress={}, world=World(), keep=1)
        staged = tracker.peak_bytes - before
    assert 2 * MIB <= staged <= staging_bytes(tensors.values())
    assert before == 84 * MIB


@pytest.mark.case(6)
def test_missing_host_memory_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"stages up to 4\.0 MiB in host memory per rank, and 3\.0 MiB is free"):
        store.check_staging(state(), host_bytes=3 * MIB)
    with pytest.raises(CheckpointError, match=r"cannot save .*step_1: saving stages .* is free; .*no earlier checkp"):
        store.save(tmp_path, step=1, tensors=state(), progress={}, world=World(), keep=1, host_bytes=3 * MIB)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    store.check_staging(state(), host_bytes=4 * MIB)


def save_where_one_rank_is_short(world: World, folder: str) -> str:
    host_bytes = MIB if world.rank == 1 else 1 << 40
    try:
        store.save(
            Path(folder),
            step=1,
            tensors={"w": torch.ones(MIB)},
            progress={},
            world=world,
            keep=1,
            host_bytes=host_bytes,
        )
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.case(6)
def test_one_rank_short_of_memory_stops_all_alike(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_where_one_rank_is_short, str(tmp_path))
    assert first == second
    assert "rank 1: saving stages" in first
