"""The run folder tells what was started, and refuses to become another run."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.configs import small_config

import amalthea
from amalthea.config.check import resolve
from amalthea.config.load import load_config
from amalthea.config.overrides import apply_overrides
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.world import World
from amalthea.launch.manifest import git_revision, write_manifest


def start(run_dir: Path, *overrides: str) -> RunConfig:
    config = apply_overrides(small_config(), overrides)
    resolved = resolve(config, world_size=1)
    write_manifest(run_dir, config=config, resolved=resolved, world=World(), chosen={"device": "cpu"})
    return config


def manifest(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "manifest.json").read_text())


def test_configuration_and_circumstances_are_kept(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    config = start(run_dir, "seed=3", "data.tokenizer.path=t.json")
    assert load_config(run_dir) == config
    written = manifest(run_dir)
    assert written["seed"] == 3
    assert written["device"] == "cpu"
    assert written["chosen"] == {"device": "cpu"}
    assert written["world"]["size"] == 1
    assert written["layout"]["accumulation_steps"] == 2
    assert written["versions"]["amalthea"] == amalthea.__version__
    assert written["versions"]["torch"].startswith("2.")
    assert written["previous_starts"] == []
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.json", "manifest.json"]


def test_the_host_is_not_named(tmp_path: Path) -> None:
    start(tmp_path)
    assert socket.gethostname() not in (tmp_path / "manifest.json").read_text()


def test_a_resumed_run_keeps_its_earlier_manifests(tmp_path: Path) -> None:
    start(tmp_path)
    start(tmp_path, "train.steps=20")
    start(tmp_path, "train.steps=30")
    written = manifest(tmp_path)
    assert len(written["previous_starts"]) == 2
    assert "previous_starts" not in written["previous_starts"][0]
    assert load_config(tmp_path).train.steps == 30


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=20",
        "train.microbatch_sequences=1",
        "logging.every_steps=1",
        "checkpoint.keep=5",
        "parallel.reshard_after_forward=false",
        "memory.recompute=block",
        "device=cpu",
    ],
)
def test_what_may_change_between_starts(tmp_path: Path, override: str) -> None:
    start(tmp_path)
    start(tmp_path, override)


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "precision=bf16",
        "model.num_layers=3",
        "model.moe.top_k=1",
        "data.path=elsewhere",
        "optim.adamw.lr=1",
        "train.global_batch_tokens=512",
    ],
)
def test_what_makes_another_run(tmp_path: Path, override: str) -> None:
    start(tmp_path)
    before = (tmp_path / "config.json").read_text()
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=f"holds another run: {key} .* → {value}") as caught:
        start(tmp_path, override)
    assert "name another --run-dir or keep these settings" in str(caught.value)
    assert (tmp_path / "config.json").read_text() == before


def test_every_difference_is_listed(tmp_path: Path) -> None:
    start(tmp_path)
    with pytest.raises(ConfigError, match=r"seed 0 → 1, model.num_layers 2 → 3, optim.adamw.lr 0.0003 → 1.0"):
        start(tmp_path, "seed=1", "optim.adamw.lr=1", "model.num_layers=3", "train.steps=99")


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_revision_is_that_of_the_tree_that_tracks_the_source(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    source = tmp_path / "src"
    source.mkdir()
    (source / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    assert git_revision(source) is None, "the tree does not track it"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    first = git_revision(source)
    assert first is not None
    assert len(first["revision"]) == 40
    assert first["dirty"] is False
    (source / "__init__.py").write_text("x = 1\n")
    assert git_revision(source) == first | {"dirty": True}
