"""The memory benchmark runs, its levers save what they shall, and its formula holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "memory" / "run.py"


def test_a_tiny_size(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--size", "tiny", "--steps", "1", "--json", str(figures)]
    done = subprocess.run([sys.executable, str(PROGRAM), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {row["lever"]: row for row in json.loads(figures.read_text(encoding="utf-8"))["rows"]}
    assert len(done.stdout.splitlines()) == 2 + len(rows)
    for row in rows.values():
        assert abs(row["estimated_bytes"] / row["kept_bytes"] - 1) < 0.02, row
        assert row["step_s"] > 0
        assert row["loss"] == rows["none"]["loss"] or row["lever"].startswith("breadth first")
    kept = [rows[f"recompute, n = {n}"]["kept_bytes"] for n in (1, 2)]
    assert kept[1] < kept[0] < rows["selective"]["kept_bytes"] < rows["none"]["kept_bytes"]
    assert rows["offload"]["host_bytes"] == 3 * 64 * 32 * 4
    assert rows["optimizer offload"]["host_bytes"] > 0
