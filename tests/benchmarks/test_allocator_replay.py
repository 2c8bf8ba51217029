"""Histories made by hand are read, replayed and found right or wrong; the step that is recorded trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.programs import load_benchmark
from support.ranks import run_ranks
from support.tiny import tiny_config

from amalthea.core.errors import DataError
from amalthea.core.world import World

MIB = 1024**2
SEGMENT, SMALL, GATHER = 0x7F0000000000, 0x7F0010000000, 0x7F0020000000


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_benchmark("allocator_replay")


def entry(action: str, address: int, mib: float, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": int(mib * MIB), "stream": stream, "pool_id": [0, 0]}


def history() -> list[dict[str, Any]]:
    """Two blocks share 20 MiB, a small one has its own 2, and another stream's 30 cannot be used by the first."""
    return [
        entry("segment_alloc", SEGMENT, 20),
        entry("alloc", SEGMENT, 8),
        entry("alloc", SEGMENT + 8 * MIB, 9),
        entry("segment_alloc", SMALL, 2),
        entry("alloc", SMALL, 0.5),
        entry("segment_alloc", GATHER, 30, 7),
        entry("alloc", GATHER, 30, 7),
        entry("free_requested", GATHER, 30, 7),
        entry("free_completed", GATHER, 30, 7),
        entry("free_completed", SEGMENT, 8),
        entry("alloc", SEGMENT, 7.5),
        entry("segment_alloc", GATHER + 64 * MIB, 30),
        entry("alloc", GATHER + 64 * MIB, 29),
        entry("snapshot", 0, 0),
    ]


def write(path: Path, entries: list[dict[str, Any]], **stats: int) -> Path:
    path.write_text(json.dumps({"device_traces": [entries, []], "stats": stats}), encoding="utf-8")
    return path


def test_a_history_that_follows_the_rules_is_met_to_the_byte(benchmark: ModuleType, tmp_path: Path) -> None:
    # 7.5 MiB take the freed 8, whose rest is too small to split off; 29 MiB leave 1 of their 30.
    peak = int((8 + 9 + 0.5 + 30) * MIB)
    found = benchmark.compare(
        benchmark.read_history(write(tmp_path / "h.json", history(), **{"allocated_bytes.all.peak": peak}))
    )
    assert found.num_requests == 6
    assert found.recorded_peak_reserved_bytes == found.replayed_peak_reserved_bytes == 82 * MIB
    assert found.largest_reserved_error == 0
    assert (found.recorded_segments, found.replayed_segments) == (4, 4)
    assert found.replayed_peak_allocated_bytes == peak
    assert found.peak_allocated_error == 0
    assert (found.num_left_out, found.num_unknown_frees) == (0, 0)


def test_a_history_that_does_not_is_told_by_how_much(benchmark: ModuleType, tmp_path: Path) -> None:
    entries = history()
    entries[5]["size"] = 60 * MIB
    found = benchmark.compare(benchmark.read_history(write(tmp_path / "h.json", entries)))
    assert found.recorded_peak_reserved_bytes == 112 * MIB
    assert found.peak_reserved_error == pytest.approx(82 / 112 - 1)
    assert found.largest_reserved_error == pytest.approx(30 / 82)
    assert found.peak_allocated_error is None


def test_maps_mean_expandable_segments(benchmark: ModuleType, tmp_path: Path) -> None:
    entries = [
        entry("segment_map", SEGMENT, 40),
        entry("alloc", SEGMENT, 30),
        entry("free_completed", SEGMENT, 30),
        entry("segment_map", SEGMENT + 40 * MIB, 20),
        entry("alloc", SEGMENT, 50),
    ]
    read = benchmark.read_history(write(tmp_path / "h.json", entries))
    assert read.expandable_segments
    found = benchmark.compare(read)
    assert found.replayed_peak_reserved_bytes == found.recorded_peak_reserved_bytes == 60 * MIB


def test_it_stops_where_memory_went_back_and_counts_what_it_does_not_know(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    entries = [entry("free_completed", 1, 5), *history(), entry("segment_free", GATHER, 30), *history()]
    found = benchmark.compare(benchmark.read_history(write(tmp_path / "h.json", entries)))
    assert (found.num_left_out, found.num_unknown_frees) == (1 + len(history()), 1)
    assert found.recorded_peak_allocated_bytes is None
    assert found.recorded_peak_reserved_bytes == 82 * MIB


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("\x80pickle", "is no memory history"),
        ("{}", "is no memory history"),
        ('{"device_traces": [[{"action": "alloc"}]]}', "is no memory history"),
        ('{"device_traces": []}', "histories of 0 devices"),
        ('{"device_traces": [[{"action": "alloc", "addr": 1, "size": 1, "pool_id": [0, 3]}]]}', "CUDA graphs"),
        ('{"device_traces": [[{"action": "alloc", "addr": 1, "size": 1}]]}', "from the start of the process"),
        ('{"device_traces": [[{"action": "dance", "addr": 1, "size": 1}]]}', "entry 0 is 'dance'"),
    ],
)
def test_what_is_no_history_is_refused(benchmark: ModuleType, tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "h.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=problem):
        benchmark.compare(benchmark.read_history(path))


def test_the_command_prints_and_writes_its_figures(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["run.py", str(write(tmp_path / "h.json", history())), "--json", str(figures)])
    benchmark.main()
    assert "peak reserved: recorded 82.0 MiB, replayed 82.0 MiB (+0.00%)" in capsys.readouterr().out
    assert json.loads(figures.read_text())["peak_reserved_error"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record on")
def test_recording_without_a_gpu_says_what_it_needs(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path / "h.json"), "--record"])
    with pytest.raises(SystemExit, match="--record needs a CUDA GPU, and this machine has none"):
        benchmark.main()
    assert not (tmp_path / "h.json").exists()


def losses(world: World) -> list[float]:
    step = load_benchmark("allocator_replay").training_steps(tiny_config(), "cpu")
    return [step(number) for number in (0, 0, 0)]


def test_the_step_that_is_recorded_trains() -> None:
    ((first, *_, last),) = run_ranks(1, losses)
    assert last < first
