"""What a run came to, for its last screen and for programs."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from amalthea.core.units import format_bytes, format_count, format_duration
from amalthea.report.records import RunRecords, number, read_run


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a run, all taken from its records; None where it has none."""

    run_dir: str
    steps: int
    """Finished optimizer steps."""
    total_steps: int | None
    """Steps that the configuration asks for."""
    tokens: int
    starts: int
    """How often the run was started; more than once if it resumed."""
    wall_s: float
    """From the opening of the records to their last entry, summed over the starts."""
    training_s: float
    """Time inside the steps that count."""
    first_loss: float | None
    last_loss: float | None
    """Mean over the last 1 % of the steps, since a single one is noisy."""
    first_bits_per_byte: float | None
    last_bits_per_byte: float | None
    """Mean over languages, at the first and at the last validation."""
    best_language: tuple[str, float] | None
    worst_language: tuple[str, float] | None
    """Code and bits per byte at the last validation."""
    median_tokens_per_s: float | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    checkpoint: str | None
    """Newest checkpoint."""
    plots: tuple[str, ...]
    next_commands: tuple[str, ...]

    def to_json(self) -> str:
        """One JSON object with these fields."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)


def summarize(run_dir: Path | str) -> Summary:
    """Sums a run folder up. Raises DataError if it is no run folder or damaged."""
    run = read_run(run_dir)
    last = run.train[-1] if run.train else {}
    losses = run.column("loss")
    mean = run.column("mean_bits_per_byte", rows=run.validation)
    languages = _languages_by_bits(run)
    starts, wall_s = _starts_and_wall_s(run)
    checkpoint = _newest_checkpoint(run.run_dir)
    return Summary(
        run_dir=str(run.run_dir),
        steps=last.get("step", 0),
        total_steps=run.config.get("train", {}).get("steps"),
        tokens=last.get("tokens", 0),
        starts=starts,
        wall_s=wall_s,
        training_s=float(np.nansum(run.column("step_s"))),
        first_loss=_edge(losses, 0),
        last_loss=_mean(losses[-math.ceil(len(losses) / 100) :]),
        first_bits_per_byte=_edge(mean, 0),
        last_bits_per_byte=_edge(mean, -1),
        best_language=languages[0] if languages else None,
        worst_language=languages[-1] if languages else None,
        median_tokens_per_s=_median(run.column("tokens_per_s")),
        peak_allocated_bytes=max((row.get("peak_allocated_bytes", 0) for row in run.train), default=0),
        peak_reserved_bytes=max((row.get("peak_reserved_bytes", 0) for row in run.train), default=0),
        checkpoint=str(checkpoint) if checkpoint else None,
        plots=tuple(str(path) for path in sorted((run.run_dir / "plots").glob("*.png"))),
        next_commands=_next_commands(run.run_dir, has_checkpoint=checkpoint is not None),
    )


def render(summary: Summary, console: Console) -> None:
    """Prints a panel of the figures, then where things lie and the commands to go on with."""
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column()
    for name, text in _figures(summary):
        figures.add_row(name, text)
    done = summary.total_steps is None or summary.steps >= summary.total_steps
    title, style = ("run finished", "green") if done else ("run not finished", "yellow")
    console.print(Panel(figures, title=title, title_align="left", border_style=style, expand=False))
    # Outside the panel and never wrapped, so that they can be copied whole.
    _lines(console, "checkpoint", [summary.checkpoint] if summary.checkpoint else [])
    _lines(console, "plots", summary.plots)
    _lines(console, "next", summary.next_commands, style="bold")


def _lines(console: Console, name: str, lines: Sequence[str], *, style: str = "") -> None:
    for index, line in enumerate(lines):
        label = Text(f"{name if index == 0 else '':12}", style="dim")
        console.print(Text.assemble(label, (line, style)), soft_wrap=True, highlight=False)


def _figures(summary: Summary) -> list[tuple[str, str]]:
    of_total = f" of {summary.total_steps:,}" if summary.total_steps else ""
    rows = [
        ("run", summary.run_dir),
        ("steps", f"{summary.steps:,}{of_total}"),
        ("tokens", format_count(summary.tokens)),
        ("wall time", _time(summary)),
    ]
    if summary.first_loss is not None and summary.last_loss is not None:
        rows.append(("loss", f"{summary.first_loss:.3f} → {summary.last_loss:.3f}"))
    if summary.first_bits_per_byte is not None:
        rows.append(
            (
                "bits per byte",
                f"{summary.first_bits_per_byte:.3f} → {summary.last_bits_per_byte:.3f}, mean over languages",
            )
        )
    if summary.best_language and summary.worst_language:
        (best, low), (worst, high) = summary.best_language, summary.worst_language
        rows.append(("languages", f"best {best} {low:.3f}, worst {worst} {high:.3f}"))
    if summary.median_tokens_per_s is not None:
        rows.append(("speed", f"{format_count(summary.median_tokens_per_s)} tokens/s (median)"))
    if summary.peak_allocated_bytes:
        reserved = f", {format_bytes(summary.peak_reserved_bytes)} reserved" if summary.peak_reserved_bytes else ""
        rows.append(("peak memory", f"{format_bytes(summary.peak_allocated_bytes)} allocated{reserved}"))
    return rows


def _time(summary: Summary) -> str:
    starts = f", {summary.starts} starts" if summary.starts > 1 else ""
    return f"{format_duration(summary.wall_s)} ({format_duration(summary.training_s)} in steps{starts})"


def _languages_by_bits(run: RunRecords) -> list[tuple[str, float]]:
    if not run.validation:
        return []
    bits = {code: number(value) for code, value in run.validation[-1]["bits_per_byte"].items()}
    finite = [(code, value) for code, value in bits.items() if math.isfinite(value)]
    return sorted(finite, key=lambda pair: pair[1])


def _starts_and_wall_s(run: RunRecords) -> tuple[int, float]:
    """Each start's time ends with the last entry before the next start: a killed one wrote no ending."""
    rows = [row for row in (*run.train, *run.validation, *run.events) if "time" in row]
    entries = sorted((datetime.fromisoformat(row["time"]), row["kind"] == "opened") for row in rows)
    spans = ((now - before).total_seconds() for (before, _), (now, opened) in pairwise(entries) if not opened)
    return sum(opened for _, opened in entries), sum(spans)


def _newest_checkpoint(run_dir: Path) -> Path | None:
    """What is still being written has another name than `step_N`."""
    found = {
        int(match[1]): path
        for path in (run_dir / "checkpoints").glob("step_*")
        if (match := re.fullmatch(r"step_(\d+)", path.name))
    }
    return found[max(found)] if found else None


def _next_commands(run_dir: Path, *, has_checkpoint: bool) -> tuple[str, ...]:
    folder = shlex.quote(str(run_dir))
    commands = [f'amalthea generate {folder} --prompt "Europe is"'] if has_checkpoint else []
    if (run_dir / "tensorboard").is_dir():
        commands.append(f"tensorboard --logdir {shlex.quote(str(run_dir / 'tensorboard'))}")
    return tuple(commands)


def _edge(values: np.ndarray, index: int) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite[index]) if len(finite) else None


def _mean(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _median(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None
