"""The benchmark of planning on this machine runs, and what it compares is the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "plan_this" / "run.py"


def test_a_tiny_shape_on_two_ranks(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--shapes", "tiny", "--ranks", "2", "--rounds", "1", "--steps", "3", "--json", str(figures)]
    done = subprocess.run([sys.executable, str(PROGRAM), *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(figures.read_text(encoding="utf-8"))
    assert abs(row["predicted_bytes"] / row["measured_bytes"] - 1) < 0.01
    # Beside other tests: a wrong unit or a forgotten part would be further off.
    assert 1 / 4 < row["predicted_s"] / row["measured_s"] < 4
