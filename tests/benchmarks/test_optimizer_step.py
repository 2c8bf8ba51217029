"""The benchmark runs as its README says, on a tiny workload and without peers, and what it counts is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "optimizer_step" / "run.py"
TINY = {"num-layers": 1, "num-experts": 4, "hidden": 64, "expert-hidden": 32}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("optimizer_step") / "result.json"
    command = [sys.executable, str(RUN), "--peers=none", "--ranks=2", "--rounds=1", f"--json={file}"]
    command += [f"--{key}={value}" for key, value in TINY.items()]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "| ours | both |" in done.stdout
    return json.loads(file.read_text())


def test_experts_send_nothing_and_dense_matrices_travel_once_each_way(result: dict[str, Any]) -> None:
    # Two ranks: half of each of the four 64×64 matrices is sent for two of them and, as the owner, sent back for two.
    expected = {"experts": (0, 0), "dense": (2 * 2 * 32 * 64 * 2, 2), "both": (2 * 2 * 32 * 64 * 2, 2)}
    for row in result["rows"]:
        assert (row["bytes_sent"], row["num_collectives"]) == expected[row["part"]], row["name"]


def test_first_updates_come_near_the_exact_polar_factor(result: dict[str, Any]) -> None:
    cosines = {(row["name"], row["part"]): row["cosine"] for row in result["rows"]}
    assert set(cosines) == {
        (name, part) for name in ("ours", "ours, Gram form") for part in ("experts", "dense", "both")
    }
    # A little less than 0.98 for the worst of a few matrices this small.
    assert all(0.97 < cosine < 0.995 for cosine in cosines.values()), cosines


def test_times_and_phases_are_there(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert len(row["wall_s"]) == 1
        assert row["wall_s"][0] > 0
        assert row["cpu_s"][0] > 0
    assert "all-to-all: wait" not in result["phases"]["experts"]
    for part, phases in result["phases"].items():
        whole = phases.pop("whole step")
        assert 0 < sum(phase["wall_s"] for phase in phases.values()) <= whole["wall_s"], part
