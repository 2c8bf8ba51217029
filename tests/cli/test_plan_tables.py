"""Tables of `amalthea plan` in a narrow terminal: nothing is cut, and what is to be pasted is one whole line."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from support.timelines import ROUND
from support.tiny import tiny_config

from amalthea.cli import console as speaking
from amalthea.cli.optimizer_tables import optimizer_tables
from amalthea.cli.plan_extra_tables import check_tables, ladder_table, search_tables
from amalthea.cli.plan_tables import count_tables, run_tables
from amalthea.plan.check_published import Check, Row
from amalthea.plan.check_retries import Retries, RetryCheck
from amalthea.plan.devices import Reserves
from amalthea.plan.levers import Lever, Rung
from amalthea.plan.optimizer_published import published_estimates
from amalthea.plan.optimizer_step import plan_optimizer_step
from amalthea.plan.optimizer_time import estimate_step
from amalthea.plan.run_plan import RunPlan, plan_run
from amalthea.plan.search import Candidate, Search
from amalthea.plan.setting import Code, Setting
from amalthea.plan.sketch import Sketch, sketch
from amalthea.recipes.europa_1t import europa_1t
from amalthea.train.build import build
from amalthea.train.step import train_step

CODE = Code(build, train_step)
SMALL = Setting(replace(ROUND, hbm_visible_gib=3 / 1024), 4, reserves=Reserves(device_gib=0.0))
"""So small that the step does not fit, and remedies are named."""
BEST = (
    "parallel.ep=16",
    "parallel.dispatch=hierarchical",
    "memory.offload=true",
    'memory.keep=["all_to_all","attention"]',
    "memory.offload_budget_gib=94",
    "train.global_batch_tokens=201326592",
)
OTHER = (*BEST[:3], "memory.blocks_per_group=2", "parallel.reduce_dtype=bf16", "parallel.dp_replicate=8")


@cache
def tight() -> RunPlan:
    config = tiny_config(precision="bf16", parallel__ep=2)
    return plan_run(config, SMALL, CODE)


@cache
def drawn() -> Sketch:
    return sketch(tiny_config(parallel__ep=2), Setting(ROUND, 4), CODE)


def found() -> Search:
    config, reason = tiny_config(), "a reason of forty-odd characters, no less: overcommitted"
    ranked = Candidate(config, BEST, 1.0, drawn()), Candidate(config, (), 2.0, drawn())
    infeasible = Candidate(config, OTHER, 3.0, drawn(), problem=reason), Candidate(config, OTHER[:1], 4.0, None, reason)
    return Search(ranked, infeasible, num_considered=4, refused={"degrees contradict each other": 12_345})


def retries() -> RetryCheck:
    rows = tuple(
        Retries(own, wide, 2**36, 2**37, 2**33, (1, 2, 2), own) for wide in (True, False) for own in (False, True)
    )
    return RetryCheck(OTHER, 91.6, rows)


@cache
def everything() -> list[Any]:
    plan, rung = tight(), Rung(Lever("a_lever_whose_name_has_no_spaces_to_break_at_" * 2), (), drawn())
    row = Row("reference", "peak", "tokens/s/GPU", 1234.5, 1e9, "layout chosen", "simulation", ("assumed",))
    europa = europa_1t()
    optimizer = plan_optimizer_step(europa, num_gpus=1536)
    estimate = estimate_step(optimizer, europa, plan.setting.cluster)
    return [
        *count_tables(plan.counted),
        *run_tables(plan, plan.to_json()),
        *search_tables(found(), "tiny", ()),
        ladder_table([rung]),
        *check_tables(Check((row,), None, ("said",), retries())),
        *optimizer_tables(optimizer, estimate, published_estimates(europa.model)),
    ]


def printed(parts: Iterable[Any], monkeypatch: pytest.MonkeyPatch, width: int) -> str:
    file = StringIO()
    monkeypatch.setattr(speaking, "output", lambda: Console(file=file, width=width, highlight=False))
    speaking.print_parts(parts)
    return file.getvalue()


def characters(part: Table | Text) -> Counter[str]:
    if isinstance(part, Text):
        written = part.plain
    else:
        cells = [str(cell) for column in part.columns for cell in column.cells]
        heads = [str(column.header) for column in part.columns] if part.show_header else []
        written = "".join((str(part.title), *heads, *cells))
    return Counter("".join(written.split()))


@pytest.mark.parametrize("width", [80, 60])
def test_no_table_loses_a_character(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    for part in everything():
        shown = printed([part], monkeypatch, width)
        assert Counter("".join(shown.split())) == characters(part), shown


def test_the_best_is_pasted_with_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ("data.seq_len=64", "parallel.ep=2")
    shown = printed(search_tables(found(), "my recipes.py:mine", typed), monkeypatch, 80).splitlines()
    pasted = shlex.split(shown[shown.index("the best, to paste") + 1])
    assert pasted[:3] == ["amalthea", "train", "my recipes.py:mine"]
    # The search's own value stands for the typed one.
    assert sorted(pasted[3:]) == sorted(("data.seq_len=64", *BEST))


def test_changes_of_every_layout_are_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = printed(search_tables(found(), "tiny", ()), monkeypatch, 80).splitlines()
    first = shown.index("changes of each layout") + 1
    numbered = [line.split(maxsplit=1) for line in shown[first : first + 4]]
    assert [number for number, _ in numbered] == ["1", "2", "3", "4"]
    assert [tuple(shlex.split(numbered[at][1])) for at in (0, 2, 3)] == [BEST, OTHER, OTHER[:1]]
    assert numbered[1][1] == "as planned above"


def test_remedies_are_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tight()
    assert plan.remedies
    shown = printed(run_tables(plan, plan.to_json()), monkeypatch, 40).splitlines()
    first = next(at for at, line in enumerate(shown) if line.startswith("would fit")) + 1
    lines = shown[first : first + len(plan.remedies)]
    assert [tuple(shlex.split(line)) for line in lines] == list(plan.remedies)
