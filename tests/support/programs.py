"""Benchmarks as modules: they are programs, not part of a package."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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


def run_benchmark(folder: str, *options: str, figures: Path, timeout_s: float = 240) -> tuple[Any, str, str]:
    """`run.py` of a benchmark as a process: the figures that it writes, and what it prints and says."""
    command = [sys.executable, str(BENCHMARKS / folder / "run.py"), *options, "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return json.loads(figures.read_text(encoding="utf-8")), done.stdout, done.stderr
