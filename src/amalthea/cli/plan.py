"""`amalthea plan`: what a model costs, and with a cluster how a run of it will go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amalthea.cli.arguments import JsonOption, OverridesArgument, RecipeArgument, load
from amalthea.cli.console import print_json, print_parts
from amalthea.core.errors import ConfigError

if TYPE_CHECKING:
    from amalthea.config.run import RunConfig

DEFAULT_CLUSTER = "jupiter"
_OR_OPTIMIZER = ", or --optimizer"


def _option(*names: str, help: str, metavar: str | None = None, minimum: int | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, min=minimum, help=help, show_default=False)


def plan_command(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    document_tokens: Annotated[
        int | None,
        _option("--document-tokens", metavar="TOKENS", help="Length of documents, each attending to itself alone."),
    ] = None,
    cluster: Annotated[
        str | None,
        _option("--cluster", metavar="NAME", help="Plan for this machine: a preset, a file.toml, or `this`, measured."),
    ] = None,
    gpus: Annotated[
        int | None,
        _option("--gpus", metavar="N", minimum=1, help="GPUs of the run; default: the recipe's degrees and batch."),
    ] = None,
    rank: Annotated[int | None, _option("--rank", metavar="R", help="The rank to trace; 0 by default.")] = None,
    expert_load: Annotated[
        Path | None,
        _option("--expert-load", metavar="FILE", help="Relative load of each expert: a JSON list, or a number a line."),
    ] = None,
    tokens: Annotated[
        str | None, _option("--tokens", metavar="N", help="Tokens to budget for, such as 1e12; default: the run's.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Look for faster layouts that fit.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare predictions with published figures.")] = False,
    html: Annotated[Path | None, _option("--html", metavar="FILE", help="Write a page with charts.")] = None,
    trace: Annotated[
        Path | None,
        _option("--trace", metavar="FILE", help="Write the timeline for ui.perfetto.dev; .gz for small files."),
    ] = None,
    expandable_segments: Annotated[
        bool | None,
        typer.Option(
            "--expandable-segments/--no-expandable-segments",
            help="The allocator's setting; on by default. The plan says what the other way gives.",
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Plan the optimizer step alone: owners, bytes, seconds.")
    ] = False,
    ep: Annotated[int | None, _option("--ep", metavar="K", minimum=1, help="Short for parallel.ep=K.")] = None,
    picture: Annotated[
        Path | None, _option("--picture", metavar="FILE.png", help="With --optimizer: draw the load of every rank.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Count a recipe's parameters, FLOP per token and bytes of state exactly; nothing is built.

    With --cluster, also trace one rank's real step without a GPU, and simulate its memory and its time.
    """
    of_run = {
        "--rank": rank,
        "--expert-load": expert_load,
        "--tokens": tokens,
        "--search": search or None,
        "--check": check or None,
        "--html": html,
        "--trace": trace,
        "--expandable-segments": expandable_segments,
    }
    _check_options(optimizer=optimizer, cluster=cluster, of_run=of_run, gpus=gpus, picture=picture)
    changes = [*(overrides or []), *([f"parallel.ep={ep}"] if ep else [])]
    config = load(recipe, changes)
    if cluster is None or optimizer:
        document, parts = _counts(config, document_tokens)
        if optimizer:
            document["optimizer"], parts = _optimizer(config, gpus, cluster or DEFAULT_CLUSTER, picture)
    else:
        from amalthea.cli.plan_run import Request, plan_and_report

        request = Request(
            recipe=recipe,
            overrides=tuple(changes),
            cluster=cluster,
            gpus=gpus,
            rank=rank or 0,
            document_tokens=document_tokens,
            expert_load=expert_load,
            tokens=tokens,
            search=search,
            check=check,
            html=html,
            trace=trace,
            expandable_segments=expandable_segments is not False,
        )
        document, parts = plan_and_report(config, request)
    if json:
        print_json(document)
        return
    print_parts(parts)


def _check_options(
    *, optimizer: bool, cluster: str | None, of_run: dict[str, Any], gpus: int | None, picture: Path | None
) -> None:
    """An option that would do nothing is an error, not a silence."""
    run = [name for name, value in of_run.items() if value is not None]
    problems = []
    if picture is not None and not optimizer:
        problems.append("--picture only means something with --optimizer; add it")
    if optimizer and run:
        problems.append(f"{', '.join(run)}: not with --optimizer, which plans the optimizer step alone; leave one out")
    elif cluster is None and not optimizer:
        idle = [*run, *(["--gpus"] if gpus is not None else [])]
        if idle:
            problems.append(f"no machine for {', '.join(idle)}; add --cluster NAME{_OR_OPTIMIZER * (not run)}")
    if problems:
        raise ConfigError(*problems)


def _counts(config: RunConfig, document_tokens: int | None) -> tuple[dict[str, Any], list[Any]]:
    from amalthea.cli.plan_tables import count_tables
    from amalthea.plan.accounting import account

    counted = account(config.model, seq_len=config.data.seq_len, document_len=document_tokens, optim=config.optim)
    document = {"recipe": config.recipe, "seq_len": config.data.seq_len, "model": counted.to_json()}
    return document, list(count_tables(counted))


def _optimizer(
    config: RunConfig, gpus: int | None, cluster_name: str, picture: Path | None
) -> tuple[dict[str, Any], list[Any]]:
    """The JSON and the tables of the optimizer step; draws the picture too."""
    from amalthea.cli.optimizer_tables import optimizer_tables
    from amalthea.launch.world import threads_of_ranks
    from amalthea.plan.machine import open_machine
    from amalthea.plan.optimizer_published import published_estimates
    from amalthea.plan.optimizer_step import default_gpus, plan_optimizer_step
    from amalthea.plan.optimizer_time import estimate_step

    num_gpus = gpus or default_gpus(config)
    threads = threads_of_ranks(num_gpus)
    with open_machine(cluster_name, num_gpus=num_gpus, device=config.device, threads=threads) as machine:
        cluster = machine.cluster
    plan = plan_optimizer_step(config, num_gpus=num_gpus)
    estimate, published = estimate_step(plan, config, cluster), published_estimates(config.model)
    document = {**plan.to_json(), **estimate.to_json(), "published": [figure.to_json() for figure in published]}
    if picture is not None:
        from amalthea.report.optimizer_load import write_load_picture

        write_load_picture(plan, picture, title=config.recipe, flops_per_s=estimate.flops_per_s)
        document["picture"] = str(picture)
    return document, optimizer_tables(plan, estimate, published)
