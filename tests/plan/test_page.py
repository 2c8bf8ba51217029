"""The page: its figures are the plan's, it loads nothing, and a browser draws it without a complaint."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.timelines import ROUND
from support.tiny import tiny_config

from amalthea.plan.page import lane_bars, memory_series, page_data, write_page
from amalthea.plan.run_plan import RunPlan, plan_run
from amalthea.plan.setting import Code, Setting
from amalthea.train.build import build
from amalthea.train.step import train_step

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
COMPLAINTS = """
<script>
const problems = [];
addEventListener("error", e => problems.push(e.message));
addEventListener("unhandledrejection", e => problems.push(String(e.reason)));
console.error = (...parts) => problems.push(parts.join(" "));
</script>
"""
PROBE = Path(__file__).with_name("page_probe.js").read_text(encoding="utf-8")
LEGIBLE = 4.5
"""Contrast of text and what is behind it (WCAG 2.2, level AA)."""
TOLD_FROM_THE_PAGE = 2.0


@cache
def plan() -> RunPlan:
    config = tiny_config(precision="bf16", parallel__ep=2, memory__recompute="block", train__microbatch_sequences=2)
    return plan_run(config, Setting(ROUND, 4), Code(build, train_step))


def test_memory_adds_up_to_the_peak() -> None:
    series = memory_series(plan())
    total = [sum(values) for values in zip(*series["classes"].values(), strict=True)]
    # Blocks as asked for; the allocator rounds them up.
    rounded = plan().memory.demand.peak_allocated.allocated_bytes / 1024**3
    assert 0.8 * rounded < max(total) <= rounded
    assert len(total) == len(series["time_s"]) == len(series["reserved_gib"])
    assert series["time_s"] == sorted(series["time_s"])


def test_bars_cover_what_the_lanes_were_busy() -> None:
    bars = lane_bars(plan())
    for lane, use in plan().timeline.lanes.items():
        assert sum(end - start for start, end, _ in bars[lane]) == pytest.approx(use.busy_s, rel=0.2)


def test_the_page_is_one_file_without_a_network(tmp_path: Path) -> None:
    write_page(tmp_path / "plan.html", plan())
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=|@import|url\(|fetch\(""", text)
    assert set(re.findall(r"https?://[^\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    found = re.search(r"const data = (\{.*\});\n", text)
    assert found is not None
    assert json.loads(found[1]) == json.loads(json.dumps(page_data(plan())))


@pytest.mark.skipif(BROWSER is None, reason="no chromium in PATH to open the page with")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 800)])
def test_a_browser_draws_it_legibly(tmp_path: Path, scheme: str, width: int) -> None:
    seen = _open(tmp_path / "plan.html", scheme, width)
    assert seen["errors"] == []
    assert seen["dark"] == (scheme == "dark")
    assert seen["polygons"] >= 4
    assert seen["kinds"] >= 4
    assert seen["wrongColours"] == []
    assert seen["chosen"] == 1
    assert seen["detail"].startswith("this plan")
    assert seen["zoomed"]
    assert seen["wheelScrollsThePage"]
    assert seen["tip"].startswith(f"{seen['kind']}\non ")
    assert seen["sideways"] <= 0
    assert seen["overlapping"] == []
    assert seen["smallestLabel"] > 12
    assert len(seen["text"]) > 30
    assert {text: ratio for text, ratio in seen["text"].items() if ratio < LEGIBLE} == {}
    assert {name: ratio for name, ratio in seen["series"].items() if ratio < TOLD_FROM_THE_PAGE} == {}


def _open(page: Path, scheme: str, width: int) -> dict[str, Any]:
    """What the probe finds on the page, opened in a colour scheme and at a width in pixels."""
    write_page(page, plan())
    text = page.read_text(encoding="utf-8").replace("<body>", "<body>" + COMPLAINTS, 1)
    page.write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    # Chromium's own number of `prefers-color-scheme`.
    command += [f"--blink-settings=preferredColorScheme={('dark', 'light').index(scheme)}"]
    command += [f"--window-size={width},1800", f"--user-data-dir={page.parent / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found is not None
    return json.loads(html.unescape(found[1]))
