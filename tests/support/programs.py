"""Benchmarks as modules: they are programs, not part of a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_benchmark(folder: str) -> ModuleType:
    """`run.py` of a benchmark, imported under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"{folder}_run", BENCHMARKS / folder / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
