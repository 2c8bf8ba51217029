"""The written file is what the timeline says."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.timelines import ROUND, exact

from amalthea.core.units import GIB
from amalthea.plan.allocator import AllocatorSettings, replay
from amalthea.plan.events import COMPUTE, Allocate, Collective, Copy, Free, Kernel, Phase, Record, Trace, Wait
from amalthea.plan.perfetto import write_chrome_trace
from amalthea.plan.timeline import simulate

TRACE = Trace(
    rank=3,
    world_size=4,
    tokens=1,
    resident=(),
    events=(
        Phase("forward", "blocks.0"),
        Allocate(0, GIB, COMPUTE, "activations"),
        Kernel("mm", COMPUTE, 1e14, 8_000_000, "bfloat16"),
        Collective("all_gather", "efsdp", (1, 3), int(2e10), "all_gather", COMPUTE, "bfloat16"),
        Record(0, "all_gather"),
        Wait(0, COMPUTE),
        Phase("backward", "blocks.0"),
        Allocate(1, GIB, COMPUTE, "activations"),
        Kernel("add", COMPUTE, 0, int(1e12), "bfloat16"),
        Free(0),
        Copy("to_host", int(2e10), "copy out"),
    ),
)


@pytest.fixture
def entries(tmp_path: Path) -> list[dict]:
    timeline = simulate(TRACE, ROUND, assumptions=exact())
    write_chrome_trace(
        tmp_path / "t.json", TRACE, timeline, memory=replay(TRACE, settings=AllocatorSettings(), steps=2)
    )
    return json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_every_piece_of_work_is_a_slice_on_its_streams_thread(entries: list[dict]) -> None:
    threads = {e["tid"]: e["args"]["name"] for e in entries if e["ph"] == "M" and e["name"] == "thread_name"}
    slices = [(threads[e["tid"]], e["name"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X" and e["tid"]]
    assert slices == [
        (COMPUTE, "mm", 0, 1e6),
        ("all_gather", "all_gather efsdp", 1e6, 2e6),
        (COMPUTE, "add", 3e6, 1e6),
        ("copy out", "to_host", 0, 1e6),
    ]
    assert {e["pid"] for e in entries} == {3}
    product = next(e for e in entries if e["name"] == "mm")
    assert product["args"] == {"class": "matmul", "bytes": "8.0 MB", "dtype": "bfloat16", "flop": "100.0 TFLOP"}
    assert next(e for e in entries if e["name"].startswith("all_gather"))["args"]["ranks"] == 2


def test_parts_of_the_step_and_memory_are_drawn_where_computing_gets_there(entries: list[dict]) -> None:
    parts = [(e["name"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X" and not e["tid"]]
    assert parts == [("forward blocks.0", 0, 1e6), ("backward blocks.0", 1e6, 3e6)]
    memory = [(e["ts"], e["args"]["allocated"], e["args"]["stranded"]) for e in entries if e["ph"] == "C"]
    assert memory == [(0, 1.0, 0.0), (1e6, 2.0, 0.0), (4e6, 1.0, 1.0)]


def test_times_of_a_track_go_on_and_do_not_overlap(tmp_path: Path) -> None:
    """Kernels of lengths that no nanosecond divides; viewers read times as whole nanoseconds."""
    kernels = tuple(Kernel("mm", COMPUTE, 1e8 + 12_345_678 * n, 8, "bfloat16") for n in range(300))
    trace = replace(TRACE, events=(Phase("forward", "blocks.0"), *kernels, Phase("backward"), *kernels))
    memory = replay(trace, settings=AllocatorSettings())
    write_chrome_trace(tmp_path / "t.json", trace, simulate(trace, ROUND, assumptions=exact()), memory=memory)
    entries = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["ph"] for e in entries} <= {"M", "X", "C"}
    named = {e["tid"] for e in entries if e["ph"] == "M" and e["name"] == "thread_name"}
    tracks: dict[int, list[tuple[int, int]]] = {}
    for e in entries:
        if e["ph"] == "X":
            tracks.setdefault(e["tid"], []).append((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)))
    assert set(tracks) <= named
    assert sum(map(len, tracks.values())) == 602
    for spans in tracks.values():
        assert all(start <= end <= following for (start, end), (following, _) in pairwise(spans))
    counted = [e["ts"] for e in entries if e["ph"] == "C"]
    assert counted == sorted(counted)


def test_a_name_that_ends_in_gz_is_compressed(tmp_path: Path) -> None:
    timeline = simulate(TRACE, ROUND, assumptions=exact())
    for name in ("t.json", "t.json.gz"):
        write_chrome_trace(tmp_path / name, TRACE, timeline)
    packed = tmp_path / "t.json.gz"
    assert gzip.decompress(packed.read_bytes()) == (tmp_path / "t.json").read_bytes()


def test_memory_may_be_left_out(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "t.json", TRACE, simulate(TRACE, ROUND, assumptions=exact()))
    assert not any(e["ph"] == "C" for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"])
