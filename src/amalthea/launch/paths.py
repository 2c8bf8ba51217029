"""Folders of the user that outlive a run."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Where downloads and prepared corpora are kept, by the conventions of the platform."""
    return platformdirs.user_cache_path("amalthea")
