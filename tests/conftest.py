"""Forks the zygote of multi-rank tests after collection, while this process is still clean."""

from __future__ import annotations

import sys

import pytest

LONG = ("test_muon_meshes", "test_processes", "test_meshes", "test_resume", "test_offload_stress", "test_trace")
"""Files of a minute each: begun first, so that no worker is left alone with one of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish(session: pytest.Session) -> None:
    """One thread everywhere, so that a sum in this process equals the same sum in a rank."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "support.ranks" in sys.modules and session.items and not session.config.option.collectonly:
        sys.modules["support.ranks"].start()


def pytest_sessionfinish() -> None:
    if "support.ranks" in sys.modules:
        sys.modules["support.ranks"].stop()
