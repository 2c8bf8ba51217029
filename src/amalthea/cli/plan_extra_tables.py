"""The tables of `amalthea plan --search`, `--check` and of the ladder of levers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from amalthea.cli.console import copyable, table
from amalthea.cli.plan_tables import lines
from amalthea.core.units import GIB

if TYPE_CHECKING:
    from rich.text import Text

    from amalthea.plan.check_published import Check
    from amalthea.plan.check_retries import RetryCheck
    from amalthea.plan.levers import Rung
    from amalthea.plan.search import Candidate, Search

_NO_PLACE = "–"
_AS_PLANNED = "as planned above"


def search_tables(found: Search, recipe: str, overrides: Sequence[str]) -> list[Any]:
    """The ranked, the infeasible with reasons, what limits the best, and the best to paste.

    `recipe` and `overrides` are those that the search began with, as typed.
    """
    parts: list[Any] = [_layouts("layouts that fit (simulation)", found.ranked)]
    if found.infeasible:
        parts.append(_layouts("layouts that do not", found.infeasible, after=len(found.ranked)))
    parts.append(_changes((*found.ranked, *found.infeasible)))
    refused = [f"{count:,} by arithmetic: {reason}" for reason, count in found.refused.items()]
    parts.append(lines(f"{found.num_considered:,} combinations; refused before any trace", refused))
    parts.append(lines("what limits the best", found.limits()))
    if found.best is not None:
        # Of two values for one key, the later: it is the search's.
        changes = dict(override.split("=", 1) for override in (*overrides, *found.best.overrides))
        paste = ["amalthea", "train", recipe, *(f"{key}={value}" for key, value in changes.items())]
        parts.append(copyable("the best, to paste", [shlex.join(paste)]))
    return parts


def _changes(candidates: Sequence[Candidate]) -> Text:
    """Outside the tables, whose cells would break what is to be copied."""
    found = [f"{number}  {shlex.join(one.overrides) or _AS_PLANNED}" for number, one in enumerate(candidates, 1)]
    return copyable("changes of each layout", found)


def _layouts(title: str, candidates: Sequence[Candidate], *, after: int = 0) -> Table:
    made = table(title, "", "tokens/s/GPU", "step", "exposed", "reserved", "host", "why not")
    made.columns[-1].justify = "left"
    for number, one in enumerate(candidates, after + 1):
        drawn = one.sketch
        if drawn is None:
            made.add_row(str(number), *(_NO_PLACE,) * 5, one.problem)
            continue
        exposed = drawn.step_s - drawn.compute_s
        made.add_row(
            str(number),
            f"{one.tokens_per_s_per_gpu:,.0f}",
            f"{drawn.step_s:.1f} s",
            f"{exposed:.1f} s",
            f"{drawn.reserved_bytes / GIB:.1f} GiB",
            f"{drawn.host_bytes / GIB:.1f} GiB",
            one.problem or "",
        )
    return made


def ladder_table(rungs: Sequence[Rung]) -> Table:
    """What each lever is worth."""
    made = table("ladder of levers (simulation)", "lever", "tokens/s/GPU", "step", "reserved", "host", "")
    made.columns[-1].justify = "left"
    for rung in rungs:
        made.add_row(
            rung.lever.name,
            f"{rung.tokens_per_s_per_gpu:,.0f}",
            f"{rung.step_s:.1f} s",
            f"{rung.sketch.reserved_bytes / GIB:.1f} GiB",
            f"{rung.sketch.host_bytes / GIB:.1f} GiB",
            rung.sketch.problem or "",
        )
    return made


def check_tables(check: Check) -> list[Any]:
    """Predicted beside published, and what the rows say together."""
    made = table("published figures", "figure", "published", "predicted", "error", "how")
    for row in check.rows:
        made.add_row(
            f"{row.name}, {row.unit}",
            f"{row.published:,.4g}",
            f"{row.predicted:,.4g}",
            f"{row.error:+.0%}",
            f"{row.use}, {row.kind}",
        )
    assumed = {line: None for row in check.rows for line in row.assumptions}
    return [
        made,
        lines("in words", check.verdict),
        lines("assumptions of these rows", list(assumed)),
        *_retry_tables(check.retries),
    ]


def _retry_tables(check: RetryCheck) -> list[Any]:
    """Retries of the allocator under the cap, and the layout that they are counted on."""
    title = f"retries under a cap of {check.cap_gib:.1f} GiB (simulation)"
    made = table(title, "gathers", "segments", "allocated", "demands", "other streams", "retries by step")
    for row in check.rows:
        made.add_row(
            "asynchronous" if row.unshard_async_op else "FSDP2's",
            "expandable" if row.expandable_segments else "default",
            f"{row.allocated_bytes / GIB:.1f} GiB",
            f"{row.reserved_bytes / GIB:.1f} GiB",
            f"{row.elsewhere_bytes / GIB:.1f} GiB",
            ", ".join(map(str, row.by_step)) + (", out of memory" if row.runs_out else ""),
        )
    layout = copyable("the layout of these retries", [shlex.join(check.overrides)])
    return [made, layout, lines("retries in words", check.verdict)]
