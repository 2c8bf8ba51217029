"""How commands speak: figures on standard output, errors on standard error, one line each."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from amalthea.core.errors import AmaltheaError, ConfigError


def output() -> Console:
    """Standard output, as it is at the time of the call."""
    return Console(highlight=False)


def print_error(error: AmaltheaError | str) -> None:
    """`error: …`, one line for each problem."""
    problems = error.problems if isinstance(error, ConfigError) else (str(error),)
    console = Console(stderr=True, highlight=False)
    for problem in problems:
        console.print("[bold red]error:[/]", end=" ")
        # soft_wrap: a message stays one line, however narrow the terminal, so that it can be searched for.
        console.print(" ".join(problem.split()), markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document, for other programs."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def table(title: str, *columns: str) -> Table:
    """A plain table, figures to the right of the first column. A word too long for its column is folded, never cut."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", header_style="dim", overflow="fold")
    return made


def copyable(title: str, found: Sequence[str]) -> Text:
    """Lines under a heading that are there to be copied: `print_parts` leaves each whole in any terminal."""
    text = Text(title, style="bold", no_wrap=True)
    return text.append("".join(f"\n{line}" for line in found), style="not bold")


def print_parts(parts: Iterable[Any]) -> None:
    """Tables and texts on standard output, an empty line after each."""
    console = output()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
        console.print()


class Progress:
    """Says what long work is at: every new phase, and within one no more than a line every few seconds."""

    def __init__(self, console: Console, *, every_s: float = 5.0) -> None:
        self._console = console
        self._every_s = every_s
        self._phase = ""
        self._said_at = 0.0

    def __call__(self, text: str) -> None:
        phase, now = text.partition(" ")[0], time.monotonic()
        if phase == self._phase and now - self._said_at < self._every_s:
            return
        self._phase, self._said_at = phase, now
        self._console.print(text, style="dim", markup=False, soft_wrap=True)
