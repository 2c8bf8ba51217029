"""The benchmark of planning on this machine runs, and what it compares is the same work."""

from __future__ import annotations

from pathlib import Path

from support.programs import run_benchmark


def test_a_tiny_shape_on_two_ranks(tmp_path: Path) -> None:
    options = ("--shapes", "tiny", "--ranks", "2", "--rounds", "1", "--steps", "3")
    (row,), _, _ = run_benchmark("plan_this", *options, figures=tmp_path / "figures.json")
    assert abs(row["predicted_bytes"] / row["measured_bytes"] - 1) < 0.01
    # Beside other tests: a wrong unit or a forgotten part would be further off.
    assert 1 / 4 < row["predicted_s"] / row["measured_s"] < 4
