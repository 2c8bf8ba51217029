"""Forks the zygote of multi-rank tests after collection, while this process is still clean."""

from __future__ import annotations

import sys

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """One thread everywhere, so that a sum in this process equals the same sum in a rank."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "support.ranks" in sys.modules and session.items and not session.config.option.collectonly:
        sys.modules["support.ranks"].start()


def pytest_sessionfinish() -> None:
    if "support.ranks" in sys.modules:
        sys.modules["support.ranks"].stop()
