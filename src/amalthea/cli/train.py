"""`amalthea train`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amalthea.cli.arguments import JsonOption, OverridesArgument, RecipeArgument, load
from amalthea.cli.console import Progress, output, print_json, table
from amalthea.core.errors import ConfigError

if TYPE_CHECKING:
    from amalthea.config.check import ResolvedRun
    from amalthea.config.run import RunConfig


def train_command(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            metavar="DIR",
            help="Run folder; a run that it holds is resumed. Default: runs/RECIPE-TIME.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and layout, train nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a recipe: alone, under torchrun or under srun, with the same command.

    Ctrl-C saves and leaves (exit code 130), a second one leaves at once. SIGTERM and SIGUSR1 save and leave with
    exit code 75: to be started again.
    """
    from amalthea.launch.world import find_place, is_main_process

    try:
        config = load(recipe, overrides)
        if dry_run:
            place = find_place()
            _print_dry_run(config, world_size=place.size, is_main=place.rank == 0, json=json)
            return
    except ConfigError as error:
        if is_main_process():
            raise
        raise typer.Exit(error.exit_code) from None  # every rank meets it; one says it
    raise typer.Exit(_train(config, run_dir, json=json))


def _train(config: RunConfig, run_dir: Path | None, *, json: bool) -> int:
    from amalthea.launch.train import run
    from amalthea.report.plots import write_plots
    from amalthea.report.summary import Summary, render, summarize

    summaries: list[Summary] = []

    def finish(folder: Path) -> None:
        write_plots(folder)
        summaries.append(summarize(folder))

    # With --json, standard output holds the document alone and progress goes to standard error.
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        code = run(config, run_dir=run_dir, say=Progress(output()), finish=finish)
    for summary in summaries:
        if json:
            print(summary.to_json())
            continue
        render(summary, output())
        if code:
            print(f"resume      the same command with --run-dir {summary.run_dir}")
    return code


def _print_dry_run(config: RunConfig, *, world_size: int, is_main: bool, json: bool) -> None:
    from amalthea.config.check import resolve

    resolved = resolve(config, world_size=world_size)
    if not is_main:
        return
    if json:
        print_json({"config": config.model_dump(mode="json"), "layout": asdict(resolved)})
    else:
        _print_layout(config, resolved)


def _print_layout(config: RunConfig, resolved: ResolvedRun) -> None:
    from amalthea.config.explain import show
    from amalthea.config.load import flatten

    settings = table("configuration", "key", "value")
    settings.columns[1].justify = "left"
    for key, value in flatten(config).items():
        settings.add_row(key, value if isinstance(value, str) else show(value))
    layout = table("layout", "", "")
    for name, value in asdict(resolved).items():
        layout.add_row(name, str(value))
    console = output()
    console.print(settings)
    console.print()
    console.print(layout)
