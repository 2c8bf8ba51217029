"""What a person sees while a run goes on: a live display on a terminal, plain lines elsewhere.

Both show the same figures. The live one draws when a step ends, at most ten times a second, and keeps no
thread: nothing wakes up beside the training, and no forked worker can inherit the terminal's lock held.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from amalthea.core.units import format_count, format_duration

if TYPE_CHECKING:
    from amalthea.train.records import StepRecord, ValidationRecord

RECENT_STEPS = 50
LOSS_DECAY = 0.9
MIN_REDRAW_S = 0.1


class Display(Protocol):
    """Shows a run's records as they come."""

    def step(self, record: StepRecord) -> None: ...

    def validation(self, record: ValidationRecord, *, previous: ValidationRecord | None) -> None: ...

    def progress(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def open_display(console: Console, *, total_steps: int, every_steps: int) -> Display:
    """A live display if the console is a capable terminal, else a line every `every_steps` steps."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, total_steps=total_steps)
    return PlainDisplay(console, total_steps=total_steps, every_steps=every_steps)


class Meter:
    """Figures that need more than the latest step: the smoothed loss and the time that is left."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.record: StepRecord | None = None
        self._step_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._weighted_loss = 0.0
        self._weight = 0.0

    def update(self, record: StepRecord) -> None:
        self.record = record
        self._step_s.append(record.step_s)
        if math.isfinite(record.loss):
            self._weighted_loss = LOSS_DECAY * self._weighted_loss + (1 - LOSS_DECAY) * record.loss
            self._weight = LOSS_DECAY * self._weight + (1 - LOSS_DECAY)

    @property
    def smoothed_loss(self) -> float:
        """Exponential mean of the finite losses; NaN while the latest is not finite, so that it is seen."""
        if self.record is None or not math.isfinite(self.record.loss):
            return math.nan
        return self._weighted_loss / self._weight

    @property
    def remaining_s(self) -> float:
        """Steps to come times the median of the recent ones: one slow step moves nothing."""
        if self.record is None:
            return math.nan
        return (self.total_steps - self.record.step) * statistics.median(self._step_s)


class PlainDisplay:
    """Lines for a log file: the first step, then every `every_steps` steps, and the last."""

    def __init__(self, console: Console, *, total_steps: int, every_steps: int) -> None:
        self._console = console
        self._every_steps = every_steps
        self._meter = Meter(total_steps)

    def step(self, record: StepRecord) -> None:
        first = self._meter.record is None
        self._meter.update(record)
        total = self._meter.total_steps
        if not (first or record.step % self._every_steps == 0 or record.step == total):
            return
        width = max(4, len(str(total)))
        parts = [f"step {record.step:{width}d}/{total}", f"loss {record.loss:.3f}", *_figures(record)]
        if record.step < total:
            parts.append(f"ETA {format_duration(self._meter.remaining_s)}")
        self._print(" | ".join(parts))

    def validation(self, record: ValidationRecord, *, previous: ValidationRecord | None) -> None:
        for line in validation_lines(record, previous=previous, width=self._console.width):
            self._print(line.plain)

    def progress(self, text: str) -> None:
        if text:
            self._print(text)

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A bar with the latest figures under it; validations are printed above and stay."""

    def __init__(self, console: Console, *, total_steps: int) -> None:
        self._console = console
        self._meter = Meter(total_steps)
        self._phase = "first step …"
        self._validation: ValidationRecord | None = None
        self._drawn_at = -math.inf
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._render)

    def step(self, record: StepRecord) -> None:
        self._meter.update(record)
        self._phase = ""
        self._draw(now=record.step == self._meter.total_steps)

    def validation(self, record: ValidationRecord, *, previous: ValidationRecord | None) -> None:
        self._validation = record
        self._phase = ""
        self._draw(now=True)
        lines = validation_lines(record, previous=previous, width=self._console.width)
        self._console.print(Text("\n").join(lines), soft_wrap=True)

    def progress(self, text: str) -> None:
        self._phase = text
        self._draw(now=True)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live.is_started:
            self._phase = ""
            self._live.stop()

    def _draw(self, *, now: bool) -> None:
        # Started with the first thing to show, so that what is prepared before may use the terminal.
        self._live.start()
        if now or time.monotonic() - self._drawn_at >= MIN_REDRAW_S:
            self._live.refresh()
            self._drawn_at = time.monotonic()

    def _render(self) -> RenderableType:
        record = self._meter.record
        lines: list[RenderableType] = [self._bar()]
        if record is not None:
            loss = self._meter.smoothed_loss
            figures = Text(f"loss {loss:.3f}", style="bold" if math.isfinite(loss) else "bold red")
            for figure in _figures(record):
                figures.append(f" · {figure}", style="not bold default")
            lines.append(figures)
        if self._validation is not None:
            lines.append(Text(_headline(self._validation), style="dim"))
        if self._phase:
            lines.append(Text(self._phase, style="italic cyan"))
        return Group(*lines)

    def _bar(self) -> Table:
        record, total = self._meter.record, self._meter.total_steps
        step = record.step if record else 0
        left = format_duration(self._meter.remaining_s) if record else "…"
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(
            ProgressBar(total=total, completed=step),
            Text(f"step {step}/{total} · {step / total:.0%} · ETA {left}"),
        )
        return bar


def validation_lines(record: ValidationRecord, *, previous: ValidationRecord | None, width: int) -> list[Text]:
    """A headline, then bits per byte by language in columns, each with its change since `previous`."""
    lines = [Text(_headline(record, previous=previous), style="bold")]
    if not record.bits_per_byte:
        return lines
    code_width = max(len(code) for code in record.bits_per_byte)
    cells = []
    for code, value in sorted(record.bits_per_byte.items()):
        cell = Text(f"  {code:{code_width}} {value:5.3f}")
        change = value - previous.bits_per_byte.get(code, math.nan) if previous else math.nan
        cell.append(f" {change:+6.3f}" if math.isfinite(change) else "", style=_change_style(change))
        cells.append(cell)
    columns = max(1, width // max(len(cell) for cell in cells))
    return lines + [Text().join(cells[i : i + columns]) for i in range(0, len(cells), columns)]


def _headline(record: ValidationRecord, *, previous: ValidationRecord | None = None) -> str:
    mean = f"{record.mean_bits_per_byte:.3f} bits per byte"
    change = record.mean_bits_per_byte - previous.mean_bits_per_byte if previous else math.nan
    if math.isfinite(change):
        mean += f" ({change:+.3f})"
    parts = [f"validation at step {record.step}", mean, f"loss {record.loss:.3f}"]
    if record.seconds > 0:
        parts.append(format_duration(record.seconds))
    return " | ".join(parts)


def _change_style(change: float) -> str:
    if not math.isfinite(change) or change == 0:
        return ""
    return "green" if change < 0 else "yellow"


def _figures(record: StepRecord) -> list[str]:
    figures = [
        f"{format_count(record.tokens_per_s).replace(' ', '')} tok/s",
        f"grad {record.grad_norm:.2f}",
        f"lr {record.lr:.1e}",
    ]
    if record.expert_imbalance is not None:
        figures.append(f"imbalance {record.expert_imbalance:.2f}")
    return figures
