"""What `amalthea plan --cluster` does: plan, search, check, write files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from amalthea.cli.console import Progress
from amalthea.core.errors import ConfigError

if TYPE_CHECKING:
    from amalthea.config.run import RunConfig
    from amalthea.plan.machine import Machine
    from amalthea.plan.setting import Code, Setting


@dataclass(frozen=True)
class Request:
    """The arguments and options, as typed."""

    recipe: str
    overrides: tuple[str, ...]
    cluster: str
    gpus: int | None
    rank: int
    document_tokens: int | None
    expert_load: Path | None
    tokens: str | None
    search: bool
    check: bool
    html: Path | None
    trace: Path | None
    expandable_segments: bool


def plan_and_report(config: RunConfig, request: Request) -> tuple[dict[str, Any], list[Any]]:
    """The JSON and the tables of a run's plan; writes the files that were asked for. Raises ConfigError."""
    from amalthea.launch.world import threads_of_ranks
    from amalthea.plan.machine import open_machine
    from amalthea.plan.optimizer_step import default_gpus

    say = Progress(Console(stderr=True, highlight=False), every_s=0.0)
    num_gpus, tokens = request.gpus or default_gpus(config), _tokens(request.tokens)
    threads = threads_of_ranks(num_gpus)
    with open_machine(request.cluster, num_gpus=num_gpus, device=config.device, threads=threads) as machine:
        return _report(config, request, _setting(request, machine, num_gpus), tokens, say)


def _report(
    config: RunConfig, request: Request, setting: Setting, tokens: int | None, say: Progress
) -> tuple[dict[str, Any], list[Any]]:
    from amalthea.cli.plan_extra_tables import check_tables, ladder_table, search_tables
    from amalthea.cli.plan_tables import run_tables
    from amalthea.plan.run_plan import plan_run

    code = _code()
    plan = plan_run(config, setting, code, tokens=tokens, say=say)
    document = plan.to_json()
    parts = run_tables(plan, document)
    found, rungs = None, ()
    if request.search:
        from amalthea.plan.search import search

        found = search(config, setting, code, say=say)
        document["search"] = found.to_json()
        parts += search_tables(found, request.recipe, request.overrides)
    if request.search or request.html is not None:
        from amalthea.plan.levers import ladder

        rungs = ladder(config, setting, code, say=say)
        document["ladder"] = [rung.to_json() for rung in rungs]
        parts.append(ladder_table(rungs))
    if request.check:
        from amalthea.plan.check_published import check_published
        from amalthea.recipes.europa_1t import europa_1t

        checked = check_published(europa_1t(), code, say=say)
        document["check"] = checked.to_json()
        parts += check_tables(checked)
    if request.html is not None:
        from amalthea.plan.page import write_page

        write_page(request.html, plan, ladder=rungs, search=found)
        document["html"] = str(request.html)
    if request.trace is not None:
        from amalthea.plan.perfetto import write_chrome_trace

        write_chrome_trace(request.trace, plan.trace, plan.timeline, memory=plan.memory)
        document["trace"] = str(request.trace)
    return document, parts


def _code() -> Code:
    from amalthea.plan.setting import Code
    from amalthea.train.build import build
    from amalthea.train.step import train_step

    return Code(build, train_step)


def _setting(request: Request, machine: Machine, num_gpus: int) -> Setting:
    from amalthea.plan.devices import Reserves
    from amalthea.plan.setting import Setting
    from amalthea.plan.trace import Workload

    return Setting(
        cluster=machine.cluster,
        num_gpus=num_gpus,
        rank=request.rank,
        workload=Workload(
            document_tokens=request.document_tokens,
            expert_load=None if request.expert_load is None else _read_load(request.expert_load),
        ),
        assumptions=machine.assumptions,
        reserves=Reserves(device_gib=0.0) if machine.is_cpu else Reserves(),
        expandable_segments=request.expandable_segments,
        stopwatch=machine.stopwatch,
    )


def _read_load(path: Path) -> tuple[float, ...]:
    """A JSON list of numbers, or one number a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--expert-load {path} cannot be read: {error.strerror or error}") from None
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else text.split()
        return tuple(float(value) for value in values)
    except (ValueError, TypeError):
        raise ConfigError(
            f"--expert-load {path} is neither a JSON list of numbers nor a number a line; give one for each expert"
        ) from None


def _tokens(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        tokens = int(float(text))
    except (ValueError, OverflowError):
        tokens = 0
    if tokens < 1:
        raise ConfigError(f"--tokens is {text!r}; give a number of tokens, such as 1e12")
    return tokens
