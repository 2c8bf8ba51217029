"""Lines for logs and the live display say the same figures; one slow step moves no estimate."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console
from support.run_records import LANGUAGES, step_record, validation_record

from amalthea.train.console import LiveDisplay, Meter, PlainDisplay, open_display, validation_lines

FIGURES = {"loss": 6.213, "tokens_per_s": 3210.0, "step_s": 0.39, "grad_norm": 0.813, "lr": 3e-4}


def console(*, terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=width, _environ={}), file


def test_plain_line() -> None:
    target, file = console(terminal=False)
    display = open_display(target, total_steps=300, every_steps=10)
    assert isinstance(display, PlainDisplay)
    display.step(step_record(120, expert_imbalance=1.21, **FIGURES))
    assert file.getvalue() == (
        "step  120/300 | loss 6.213 | 3.2k tok/s | grad 0.81 | lr 3.0e-04 | imbalance 1.21 | ETA 1 min 10 s\n"
    )


def test_plain_lines_come_first_last_and_every_so_often() -> None:
    target, file = console(terminal=False, width=40)
    display = PlainDisplay(target, total_steps=25, every_steps=10)
    for step in range(3, 26):
        display.step(step_record(step, expert_imbalance=None))
    display.progress("saving checkpoint …")
    *lines, phase = file.getvalue().splitlines()
    assert [int(line[4:9]) for line in lines] == [3, 10, 20, 25]  # one line each, however narrow
    assert "imbalance" not in file.getvalue()
    assert "ETA" not in lines[-1]
    assert phase == "saving checkpoint …"


def test_plain_line_shows_numbers_that_are_not_finite() -> None:
    target, file = console(terminal=False)
    PlainDisplay(target, total_steps=5, every_steps=1).step(step_record(1, loss=math.nan, grad_norm=math.inf))
    assert "loss nan" in file.getvalue()
    assert "grad inf" in file.getvalue()


def test_live_display_shows_the_figures_and_keeps_the_validation() -> None:
    target, file = console(terminal=True)
    display = open_display(target, total_steps=300, every_steps=10)
    assert isinstance(display, LiveDisplay)
    display.note("resumed after step 200")
    display.progress("validating …")
    display.validation(validation_record(0), previous=None)
    display.step(step_record(300, expert_imbalance=1.21, **FIGURES))
    display.close()
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert text.startswith("resumed after step 200\n")
    assert "validating …" in text
    assert "step 300/300 · 100%" in text
    assert "loss 6.213 · 3.2k tok/s · grad 0.81 · lr 3.0e-04 · imbalance 1.21" in text
    assert text.count("validation at step 0") >= 2  # printed above, and under the bar
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1  # cursor given back


def test_live_display_is_drawn_at_most_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    target, file = console(terminal=True)
    now = [100.0]
    monkeypatch.setattr("amalthea.train.console.time.monotonic", lambda: now[0])
    display = LiveDisplay(target, total_steps=1000)
    display.step(step_record(1))
    drawn = len(file.getvalue())
    for step in range(2, 100):
        now[0] += 0.001
        display.step(step_record(step))
    assert len(file.getvalue()) == drawn
    now[0] += 0.1
    display.step(step_record(100))
    assert "step 100/1000" in file.getvalue()
    display.close()


def test_dumb_terminal_gets_plain_lines() -> None:
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(open_display(dumb, total_steps=1, every_steps=1), PlainDisplay)


def test_meter_takes_the_median_and_owns_up_to_nan() -> None:
    meter = Meter(total_steps=10)
    assert math.isnan(meter.remaining_s)
    for step, (step_s, loss) in enumerate([(30.0, 5.0), (2.0, 5.0), (2.0, 5.0)], start=1):
        meter.update(step_record(step, step_s=step_s, loss=loss))
    assert meter.remaining_s == pytest.approx(7 * 2.0)
    assert meter.smoothed_loss == pytest.approx(5.0)
    meter.update(step_record(4, step_s=2.0, loss=math.nan))
    assert math.isnan(meter.smoothed_loss)
    meter.update(step_record(5, step_s=2.0, loss=4.0))
    assert 4.0 < meter.smoothed_loss < 5.0


@pytest.mark.parametrize("width", [40, 80, 120])
def test_validation_lines_name_every_language_and_fit(width: int) -> None:
    before, after = validation_record(0), validation_record(100)
    headline, *table = validation_lines(after, previous=before, width=width)
    change = after.mean_bits_per_byte - before.mean_bits_per_byte
    assert f"{after.mean_bits_per_byte:.3f} bits per byte ({change:+.3f})" in headline.plain
    text = "\n".join(line.plain for line in table)
    assert max(map(len, text.splitlines())) <= width
    cells = re.findall(r"([a-z]{2}) +(\d\.\d{3}) +(-\d\.\d{3})", text)
    assert [code for code, _, _ in cells] == LANGUAGES
    assert float(cells[0][1]) == pytest.approx(after.bits_per_byte["bg"], abs=6e-4)
    assert float(cells[0][2]) == pytest.approx(after.bits_per_byte["bg"] - before.bits_per_byte["bg"], abs=6e-4)


def test_validation_without_languages_is_a_headline() -> None:
    record = validation_record(5)
    empty = type(record)(step=5, loss=2.0, bits_per_byte={}, mean_bits_per_byte=math.nan)
    assert [line.plain for line in validation_lines(empty, previous=record, width=80)] == [
        "validation at step 5 | nan bits per byte | loss 2.000"
    ]
