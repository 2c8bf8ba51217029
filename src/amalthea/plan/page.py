"""One self-contained HTML page of a plan: memory over the step, the timeline, layouts compared, the ladder of levers.

The page holds its figures as JSON and draws them itself (`page.html`); it loads nothing from anywhere.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from amalthea.core.units import GIB
from amalthea.plan.events import Allocate, Free, Phase
from amalthea.plan.levers import Rung
from amalthea.plan.run_plan import RunPlan
from amalthea.plan.search import Search
from amalthea.plan.timeline import compute_reaches, kind_of, lane_of, work_of

_POINTS = 600
_SPANS = 6000
"""Bars of the timeline: neighbours of one kind on a lane are joined until there are no more than these."""
_PLACE = "/*PLAN*/null"


def write_page(path: Path, plan: RunPlan, *, ladder: Sequence[Rung] = (), search: Search | None = None) -> None:
    """Writes the page, some 0.5 MB. Communication: none."""
    template = files("amalthea.plan").joinpath("page.html").read_text(encoding="utf-8")
    # A page's script ends at the first "</script", whatever it is in.
    data = json.dumps(page_data(plan, ladder=ladder, search=search)).replace("</", "<\\/")
    path.write_text(template.replace(_PLACE, data), encoding="utf-8")


def page_data(plan: RunPlan, *, ladder: Sequence[Rung] = (), search: Search | None = None) -> dict[str, Any]:
    """What the page draws."""
    document = plan.to_json()
    return {
        "plan": {key: value for key, value in document.items() if key != "model"},
        "memory": memory_series(plan),
        "lanes": lane_bars(plan),
        "phases": _phases(plan),
        "layouts": _layouts(plan, document, search),
        "ladder": [rung.to_json() for rung in ladder],
    }


def memory_series(plan: RunPlan) -> dict[str, Any]:
    """GiB by class at moments of the step, and what the allocator reserves; bytes as asked for."""
    events = plan.trace.events
    every = max(1, -(-len(events) // _POINTS))
    held: Counter[str] = Counter()
    sizes: dict[int, Allocate] = {}
    for block in plan.trace.resident:
        sizes[block.block] = block
        held[block.memory] += block.num_bytes
    moments: list[int] = []
    snapshots: list[dict[str, int]] = []
    largest, best = -1, dict(held)
    for index, event in enumerate(events):
        if isinstance(event, Allocate):
            sizes[event.block] = event
            held[event.memory] += event.num_bytes
        elif isinstance(event, Free):
            freed = sizes.pop(event.block)
            held[freed.memory] -= freed.num_bytes
        if (total := sum(held.values())) > largest:
            largest, best = total, dict(held)
        if (index + 1) % every == 0 or index + 1 == len(events):
            moments.append(index)
            snapshots.append(best)
            largest = -1
    times = compute_reaches(plan.trace, plan.timeline.spans, np.array(moments, dtype=np.int64)).tolist()
    found = {name for one in snapshots for name in one}
    # What hardly changes lies below.
    classes = sorted(found, key=lambda name: -min(one.get(name, 0) for one in snapshots))
    series = plan.usage.series
    reserved = [series.reserved_bytes[max(0, bisect_right(series.events, index) - 1)] / GIB for index in moments]
    return {
        "time_s": times,
        "classes": {name: [one.get(name, 0) / GIB for one in snapshots] for name in classes},
        "reserved_gib": reserved,
    }


def lane_bars(plan: RunPlan) -> dict[str, list[list[Any]]]:
    """Bars of each lane: start and end in seconds, kind. Neighbours of one kind closer than a gap are one bar."""
    spans = plan.timeline.spans
    found: dict[str, list[list[Any]]] = {}
    columns = (spans.start_s.tolist(), spans.end_s.tolist(), spans.kernel_class.tolist())
    for event, start, end, number in zip(work_of(plan.trace, spans), *columns, strict=True):
        found.setdefault(lane_of(event), []).append([start, end, kind_of(event, number)])
    gap = plan.timeline.step_s / _SPANS
    while sum(map(len, found.values())) > _SPANS and gap < plan.timeline.step_s:
        found = {lane: _joined(bars, gap) for lane, bars in found.items()}
        gap *= 2
    return {lane: [[round(s, 6), round(e, 6), kind] for s, e, kind in bars] for lane, bars in found.items()}


def _joined(bars: list[list[Any]], gap: float) -> list[list[Any]]:
    """Bars shorter than the gap are swallowed by the one before, which keeps its kind."""
    out: list[list[Any]] = []
    for start, end, kind in bars:
        last = out[-1] if out else None
        near = last is not None and start - last[1] <= gap
        if last is not None and near and (kind == last[2] or end - start < gap):
            last[1] = max(last[1], end)
        else:
            out.append([start, end, kind])
    return out


def _phases(plan: RunPlan) -> list[list[Any]]:
    """Start in seconds and name of the large parts of the step."""
    found = [(index, event) for index, event in enumerate(plan.trace.events) if isinstance(event, Phase)]
    starts = compute_reaches(plan.trace, plan.timeline.spans, np.array([i for i, _ in found], dtype=np.int64)).tolist()
    parts: list[list[Any]] = []
    for (_, phase), start in zip(found, starts, strict=True):
        name = "backward" if phase.name == "recompute" else phase.name
        if not parts or parts[-1][1] != name:
            parts.append([start, name])
    return parts


def _layouts(plan: RunPlan, document: dict[str, Any], search: Search | None) -> list[dict[str, Any]]:
    """This plan, whose JSON is `document`, first, then what was searched."""
    timeline, memory = document["timeline"], document["memory"]
    own = {
        "name": "this plan",
        "overrides": [],
        "tokens_per_s_per_gpu": timeline["tokens_per_s_per_gpu"],
        "step_s": timeline["step_s"],
        "compute_s": timeline["compute_s"],
        "reserved_gib": memory["reserved_gib"],
        "host_gib": memory["host_gib"],
        "by_class_gib": memory["by_class_gib"],
        "exposed_s": timeline["exposed_by_kind_s"],
        "problem": "; ".join(plan.problems) or None,
    }
    if search is None:
        return [own]
    others = [one.to_json() for one in (*search.ranked, *search.infeasible) if one.sketch is not None]
    return [own, *({"name": " ".join(one["overrides"]) or "as the recipe", **one} for one in others)]
