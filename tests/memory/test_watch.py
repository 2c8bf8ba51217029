"""Figures of a step, and what is said where memory runs out."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import RankError, run_ranks
from support.tiny import tiny_batch, tiny_config

from amalthea.config.check import resolve
from amalthea.core.pieces import Piece, Pieces
from amalthea.core.world import World
from amalthea.memory import monitor
from amalthea.memory.config import MemoryConfig
from amalthea.memory.monitor import freed_and_kept_bytes, peak_memory
from amalthea.memory.oom import (
    OutOfMemoryError,
    is_out_of_memory,
    setting_to_change,
    stranded_by_stream,
    take_snapshot,
)
from amalthea.memory.tracker import StorageTracker
from amalthea.memory.watch import MemoryWatch
from amalthea.train.build import build
from amalthea.train.step import train_step

MIB = 1 << 20
CPU = torch.device("cpu")


def watch_on(folder: Path, **settings: Any) -> MemoryWatch:
    return MemoryWatch(MemoryConfig(**settings), run_dir=folder, rank=0, device=CPU)


def test_with_tracking_peak_allocated_is_exact_and_starts_anew(tmp_path: Path) -> None:
    with watch_on(tmp_path, track=True) as watch:
        tensor = torch.empty(8 * MIB, dtype=torch.uint8)
        del tensor
        assert watch.read().allocated_bytes == 8 * MIB
        assert watch.read().allocated_bytes == 0


def test_without_tracking_it_is_the_resident_set(tmp_path: Path) -> None:
    with watch_on(tmp_path) as watch:
        figures = watch.read()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert figures.allocated_bytes == figures.reserved_bytes == pytest.approx(resident, rel=0.01)
    assert figures.num_alloc_retries == 0


def stranded_by_freeing(world: World) -> tuple[int, int]:
    """Freed and kept bytes before and after freeing small blocks of 64 MiB in all, every other one."""
    blocks = [bytearray(32 * 1024) for _ in range(2048)]
    before = freed_and_kept_bytes()
    del blocks[::2]
    return before, freed_and_kept_bytes()


def test_freed_memory_that_the_c_library_keeps_is_stranded() -> None:
    before, after = run_ranks(1, stranded_by_freeing)[0]
    assert after - before == pytest.approx(32 * MIB, rel=0.05)


def test_a_gpus_figures_come_from_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "allocated_bytes.all.peak": 70,
        "reserved_bytes.all.peak": 90,
        "inactive_split_bytes.all.peak": 15,
        "num_alloc_retries": 2,
    }
    resets = []
    monkeypatch.setattr(monitor.torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(monitor.torch.cuda, "reset_peak_memory_stats", resets.append)
    device = torch.device("cuda", 3)
    assert peak_memory(device) == monitor.PeakMemory(70, 90, 15, 2)
    assert resets == [device]


def test_stranded_bytes_by_stream_leave_out_segments_that_could_be_given_back() -> None:
    segments = [
        {"stream": 0, "total_size": 20, "active_size": 14},
        {"stream": 7, "total_size": 20, "active_size": 0},
        {"stream": 7, "total_size": 10, "active_size": 1},
        {"stream": 7, "total_size": 10, "active_size": 2},
    ]
    assert stranded_by_stream(segments) == {"0": 6, "7": 17}


def run_out(world: World, folder: str, settings: dict[str, Any], extra_bytes: int) -> str:
    """A step under a real limit on the process's address space; returns the error's words."""
    config = tiny_config(
        model__num_layers=6,
        model__hidden_size=64,
        model__max_seq_len=1024,
        data__seq_len=1024,
        train__global_batch_tokens=8 * 1024,
        **settings,
    )
    with MemoryWatch(config.memory, run_dir=Path(folder), rank=0, device=CPU) as watch:
        run = build(config, resolve(config, world_size=1), world)
        watch.follow(run.model, run.optimizers.named_state)
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        used_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (used_pages * resource.getpagesize() + extra_bytes, hard))
        try:
            train_step(run, [tiny_batch(0, range(8), seq_len=1024)], lr_factor=1.0, tallies=())
        except RuntimeError as error:
            # Lifted before the watch looks around, for which a GPU's host has room as well.
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            with pytest.raises(OutOfMemoryError) as caught:
                watch.__exit__(type(error), error, error.__traceback__)
            watch.__enter__()
            return str(caught.value)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return "it fitted"


def give_up(world: World) -> None:
    raise RuntimeError("a new process is wanted")


@pytest.fixture
def new_process() -> None:
    """The next rank is a process that has freed no memory, which would otherwise be used before the limit counts."""
    with pytest.raises(RankError):
        run_ranks(1, give_up)


@pytest.mark.usefixtures("new_process")
def test_a_failed_allocation_names_the_holders(tmp_path: Path) -> None:
    said = run_ranks(1, run_out, str(tmp_path), {"memory__track": True}, 40 * MIB)[0]
    assert said.startswith("rank 0 ran out of memory (asked for ")
    assert "blocks.0." in said, said
    assert "set memory.recompute=block" in said
    assert str(tmp_path / "oom_rank0.json") in said
    assert "\n" not in said
    snapshot = json.loads((tmp_path / "oom_rank0.json").read_text(encoding="utf-8"))
    sizes = [holder["num_bytes"] for holder in snapshot["holders"]]
    assert sizes == sorted(sizes, reverse=True)
    peak_bytes = snapshot["peak"]["allocated_bytes"]
    assert peak_bytes / 2 < sum(sizes) <= peak_bytes
    names = [holder["name"] for holder in snapshot["holders"]]
    assert "blocks.3.moe.experts.w_up" in names
    assert "blocks.3.moe.experts.w_up.exp_avg" in names
    assert any("aten.mm" in name and "float32" in name for name in names)


@pytest.mark.usefixtures("new_process")
def test_without_tracking_it_names_what_has_a_name(tmp_path: Path) -> None:
    said = run_ranks(1, run_out, str(tmp_path), {"memory__recompute": "block"}, 16 * MIB)[0]
    assert "memory.offload=true" in said
    snapshot = json.loads((tmp_path / "oom_rank0.json").read_text(encoding="utf-8"))
    assert "blocks.3.moe.experts.w_up" in [holder["name"] for holder in snapshot["holders"]]


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^something else$"), watch_on(tmp_path):
        raise RuntimeError("something else")
    assert list(tmp_path.iterdir()) == []


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(OSError("DefaultCPUAllocator"))


def test_the_setting_to_change_is_one_that_is_not_set() -> None:
    assert "memory.recompute=block" in setting_to_change(MemoryConfig())
    assert "memory.offload=true" in setting_to_change(MemoryConfig(recompute="block"))
    line = setting_to_change(MemoryConfig(recompute="block", offload=True))
    assert "memory.blocks_per_group, set memory.offload_optimizer=true, set memory.offload_parameters=true, or" in line
    line = setting_to_change(MemoryConfig(recompute="block", offload=True, offload_parameters=True))
    assert "memory.blocks_per_group, set memory.offload_optimizer=true, or" in line


def test_what_rests_on_the_host_holds_nothing_of_another_device() -> None:
    resting = Pieces((4,), torch.float32, [Piece((0,), torch.zeros(4))])
    named = {"here": torch.empty(8, device="meta"), "weight": torch.zeros(16), "momentum": resting}
    snapshot = take_snapshot(
        MemoryError(), rank=0, device=torch.device("meta"), named=named, config=MemoryConfig(), tracker=StorageTracker()
    )
    assert [(holder.name, holder.num_bytes) for holder in snapshot.holders] == [("here", 32)]
