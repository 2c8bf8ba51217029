"""The page: its figures are the plan's, it loads nothing, and a browser draws it without a complaint."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from support.timelines import ROUND
from support.tiny import tiny_config

from amalthea.plan.page import lane_bars, memory_series, page_data, write_page
from amalthea.plan.run_plan import RunPlan, plan_run
from amalthea.plan.setting import Code, Setting
from amalthea.train.build import build
from amalthea.train.step import train_step

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """
<script>
addEventListener("error", e => document.body.setAttribute("data-error", e.message));
</script>
"""
CLICK = """
<script>
document.querySelector("#layouts tr.pick").click();
document.getElementById("in").click();
const picture = document.getElementById("timeline"), pen = picture.getContext("2d");
const painted = pen.getImageData(0, 0, picture.width, picture.height).data.some(value => value > 0);
document.body.setAttribute("data-drawn", JSON.stringify({
  polygons: document.querySelectorAll("#memory polygon").length, painted,
  chosen: document.querySelectorAll("tr.on").length, detail: document.getElementById("detail").textContent,
  zoomed: view.to - view.from < plan.timeline.step_s }));
</script>
"""


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
def test_a_browser_draws_it(tmp_path: Path) -> None:
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    write_page(page, plan())
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<body>", "<body>" + PROBE, 1).replace("</body>", CLICK + "</body>"), encoding="utf-8")
    dumped = _browse(page, "--dump-dom")
    assert "data-error" not in dumped.replace('setAttribute("data-error"', "")
    drawn = re.search(r'data-drawn="([^"]*)"', dumped)
    assert drawn is not None
    seen = json.loads(drawn[1].replace("&quot;", '"'))
    assert seen["polygons"] >= 4
    assert seen["painted"]
    assert seen["zoomed"]
    assert seen["chosen"] == 1
    assert seen["detail"].startswith("this plan")
    _browse(page, f"--screenshot={picture}", "--window-size=1100,1800")
    assert picture.stat().st_size > 10_000


def _browse(page: Path, *options: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
