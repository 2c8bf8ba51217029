"""The memory benchmark runs, its levers save what they shall, and its formula holds."""

from __future__ import annotations

from pathlib import Path

from support.programs import run_benchmark


def test_a_tiny_size(tmp_path: Path) -> None:
    options = ("--size", "tiny", "--steps", "1")
    result, out, _ = run_benchmark("memory", *options, figures=tmp_path / "figures.json", timeout_s=120)
    rows = {row["lever"]: row for row in result["rows"]}
    assert len(out.splitlines()) == 2 + len(rows)
    for row in rows.values():
        assert abs(row["estimated_bytes"] / row["kept_bytes"] - 1) < 0.02, row
        assert row["step_s"] > 0
        assert row["loss"] == rows["none"]["loss"] or row["lever"].startswith("breadth first")
    kept = [rows[f"recompute, n = {n}"]["kept_bytes"] for n in (1, 2)]
    assert kept[1] < kept[0] < rows["selective"]["kept_bytes"] < rows["none"]["kept_bytes"]
    assert rows["offload"]["host_bytes"] == 3 * 64 * 32 * 4
    assert rows["optimizer offload"]["host_bytes"] > 0
