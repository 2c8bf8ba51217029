"""Files of users' own clusters: what they say is what is planned for, and what is wrong is named."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from amalthea.core.errors import ConfigError
from amalthea.plan import clusters_file
from amalthea.plan.clusters import CLUSTERS, Cluster, get_cluster
from amalthea.plan.clusters_file import find_cluster, read_cluster

EXAMPLE = "\n".join(line.strip() for line in (clusters_file.__doc__ or "").splitlines() if " = " in line)
"""The file that the module's documentation shows."""


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_documented_file_is_the_preset_that_it_describes(tmp_path: Path) -> None:
    found, preset = find_cluster(str(write(tmp_path, EXAMPLE))), get_cluster("h100-sxm")
    words = {"name", "network", "scheduler", "source"}
    assert {k: v for k, v in asdict(found).items() if k not in words} == {
        k: v for k, v in asdict(preset).items() if k not in words
    }
    assert found.name == "mine"
    assert found.num_gpus is None


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_every_preset_can_be_said_in_a_file(cluster: Cluster, tmp_path: Path) -> None:
    def toml(value: object) -> str:
        if isinstance(value, tuple):
            return f"[{', '.join(map(toml, value))}]"
        return f'"{value}"' if isinstance(value, str) else str(value)

    text = "\n".join(f"{key} = {toml(value)}" for key, value in asdict(cluster).items() if value is not None)
    assert read_cluster(write(tmp_path, text)) == cluster


def test_names_without_an_ending_are_presets() -> None:
    assert find_cluster("jupiter") is get_cluster("jupiter")
    with pytest.raises(ConfigError, match="did you mean jupiter"):
        find_cluster("jupyter")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("peak_tflops = 989", "peak_tflops = -1|peak_tflops is -1.*above 0"),
        ("gpus_per_node = 8", 'gpus_per_node = "many"|gpus_per_node.*whole number'),
        ("host_gb = 256", "host_gbs = 256|host_gbs.*did you mean host_gb"),
        ("host_gb = 256", "|host_gb"),
        ("host_gb = 256", "host_gb = 256\nintra_pair_gb_per_s = 500|intra_pair_gb_per_s is 500, more than the 450"),
        ("host_gb = 256", 'host_gb = 256\nunverified = ["speed"]|unverified names speed'),
        ("host_gb = 256", "host_gb = = 256|cannot be read as TOML"),
    ],
)
def test_what_is_wrong_is_named(change: str, problem: str, tmp_path: Path) -> None:
    replacement, message = problem.split("|")
    path = write(tmp_path, EXAMPLE.replace(change, replacement))
    with pytest.raises(ConfigError, match=message) as raised:
        read_cluster(path)
    assert "mine.toml" in str(raised.value)
    assert "\n" not in raised.value.problems[0]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml does not exist; give a preset's name or a TOML file"):
        find_cluster(str(tmp_path / "none.toml"))
