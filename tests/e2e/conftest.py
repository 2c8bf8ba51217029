"""What the end-to-end tests share: one corpus, one cache, and runs that nothing happened to, each made once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.runs import Places, WholeRun, make_corpus, run_config, run_inside


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("e2e")
    return Places(make_corpus(folder / "corpus"), folder / "cache")


@pytest.fixture(autouse=True)
def _cache_of_tests(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here reads or fills the user's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(places.cache))


@pytest.fixture(scope="session")
def whole_run(places: Places, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """`whole_run(ranks, **overrides)`: the folder of such a run, uninterrupted. Copy it before changing anything."""
    made: dict[tuple[object, ...], Path] = {}

    def make(ranks: int = 1, **overrides: Any) -> Path:
        key = (ranks, *sorted(overrides.items()))
        if key not in made:
            run_dir = tmp_path_factory.mktemp("whole") / "run"
            log = run_dir.with_name("drawn.log")
            config = run_config(places.corpus, **overrides)
            codes = run_ranks(ranks, run_inside, config, run_dir, places.cache, None, log)
            assert codes == [0] * ranks
            made[key] = run_dir
        return made[key]

    return make


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own in memory; needs root."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(size_bytes)`: an empty disk of that size."""
    with ExitStack() as stack:
        yield lambda size_bytes: stack.enter_context(mounted(tmp_path / "disk", f"size={size_bytes}"))


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody can write: root is stopped by nothing less than the file system."""
    if os.geteuid() == 0:
        with mounted(tmp_path / "read_only", "ro,size=64k") as folder:
            yield folder
        return
    folder = tmp_path / "read_only"
    folder.mkdir(mode=0o500)
    yield folder
    folder.chmod(0o700)
