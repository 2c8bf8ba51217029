"""Reads a run folder back: its rows, events, configuration and manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from amalthea.core.errors import DataError
from amalthea.train.records import EVENTS_FILE, METRICS_FILE

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """What a run wrote down, in the order of writing; empty where it wrote nothing."""

    run_dir: Path
    train: tuple[Row, ...]
    """Training rows; of `expert_load` only the newest is kept, since a large model's fill the memory."""
    validation: tuple[Row, ...]
    events: tuple[Row, ...]
    config: Row
    manifest: Row

    def column(self, name: str, *, rows: Sequence[Row] | None = None) -> np.ndarray:
        """One figure of every training row (or of `rows`), float64 [rows]; NaN where it is missing or null."""
        chosen = self.train if rows is None else rows
        return np.array([number(row.get(name)) for row in chosen], dtype=np.float64)

    @property
    def expert_load(self) -> tuple[int, np.ndarray] | None:
        """Step and shares [MoE layers, experts] of the newest row that has them."""
        for row in reversed(self.train):
            if row.get("expert_load"):
                return row["step"], np.array(row["expert_load"], dtype=np.float64)
        return None

    @property
    def languages(self) -> list[str]:
        """Codes of every language that was ever validated, sorted."""
        return sorted({code for row in self.validation for code in row["bits_per_byte"]})

    def bits_per_byte(self, code: str) -> np.ndarray:
        """Of one language in every validation, float64 [validations]."""
        return np.array([number(row["bits_per_byte"].get(code)) for row in self.validation])


def read_run(run_dir: Path | str) -> RunRecords:
    """Reads the folder of a run, finished or not; a last line torn by a kill is left out.

    Raises DataError if the folder is no run's, or if a file in it is damaged elsewhere than at its end.
    """
    folder = Path(run_dir)
    metrics, config = folder / METRICS_FILE, folder / "config.json"
    if not metrics.is_file() and not config.is_file():
        raise DataError(
            f"{folder} is no run folder: it has neither {METRICS_FILE} nor config.json; "
            "give the folder that `amalthea train` named (runs/RECIPE-TIME, or --run-dir)"
        )
    rows = _with_newest_load(_read_lines(metrics))
    return RunRecords(
        run_dir=folder,
        train=tuple(row for row in rows if row.get("kind") == "train"),
        validation=tuple({"bits_per_byte": {}} | row for row in rows if row.get("kind") == "validation"),
        events=tuple(_read_lines(folder / EVENTS_FILE)),
        config=_read_object(config),
        manifest=_read_object(folder / "manifest.json"),
    )


def number(value: float | None) -> float:
    """A figure of a row, NaN for null."""
    return math.nan if value is None else float(value)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    torn = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for index, line in enumerate(file, start=1):
            if torn:
                raise DataError(f"{path}: line {torn} is not a JSON object; restore the file or remove the line")
            try:
                row = json.loads(line)
            except ValueError:
                torn = index
            else:
                yield row


def _with_newest_load(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    newest: dict[str, Any] = {}
    for row in rows:
        if "expert_load" in row:
            newest.pop("expert_load", None)
            newest = row
        kept.append(row)
    return kept


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); restore it from a copy of the run") from error
