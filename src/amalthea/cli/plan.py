"""`amalthea plan`: what a model costs, by arithmetic alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amalthea.cli.arguments import JsonOption, OverridesArgument, RecipeArgument, load
from amalthea.cli.console import output, print_json, table

if TYPE_CHECKING:
    from rich.table import Table

    from amalthea.config.run import RunConfig
    from amalthea.plan.accounting import Accounting

DEFAULT_CLUSTER = "jupiter"


def plan_command(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    document_tokens: Annotated[
        int | None,
        typer.Option(
            "--document-tokens",
            metavar="TOKENS",
            help="Also count attention over documents of this length, each attending to itself.",
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Plan the optimizer step: owners, bytes, seconds.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            min=1,
            help="GPUs of the run; by default the recipe's degrees, or one microbatch each.",
            show_default=False,
        ),
    ] = None,
    ep: Annotated[
        int | None, typer.Option("--ep", metavar="K", min=1, help="Short for parallel.ep=K.", show_default=False)
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help=f"Machine to estimate for; {DEFAULT_CLUSTER} by default.",
            show_default=False,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE.png", help="Draw the load of every rank.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Count a recipe's parameters, FLOP per token and bytes of state exactly; nothing is built.

    With --optimizer, also plan the optimizer step of a run over many GPUs, and estimate its seconds.
    """
    from amalthea.plan.accounting import account

    _needs_optimizer(optimizer, {"--gpus": gpus, "--cluster": cluster, "--picture": picture})
    config = load(recipe, [*(overrides or []), *([f"parallel.ep={ep}"] if ep else [])])
    counted = account(config.model, seq_len=config.data.seq_len, document_len=document_tokens, optim=config.optim)
    document: dict[str, Any] = {"recipe": config.recipe, "seq_len": config.data.seq_len, "model": counted.to_json()}
    if optimizer:
        document["optimizer"], tables = _optimizer(config, gpus, cluster or DEFAULT_CLUSTER, picture)
    else:
        tables = [_parameters(counted), _flops(counted), _state(counted)]
    if json:
        print_json(document)
        return
    console = output()
    for part in tables:
        console.print(part)
        console.print()


def _needs_optimizer(optimizer: bool, options: dict[str, Any]) -> None:
    """An option that would do nothing is an error, not a silence."""
    from amalthea.core.errors import ConfigError

    given = [name for name, value in options.items() if value is not None]
    if given and not optimizer:
        raise ConfigError(f"{', '.join(given)} only mean something with --optimizer; add it")


def _optimizer(
    config: RunConfig, gpus: int | None, cluster_name: str, picture: Path | None
) -> tuple[dict[str, Any], list[Any]]:
    """The JSON and the tables of the optimizer step; draws the picture too."""
    from amalthea.cli.optimizer_tables import optimizer_tables
    from amalthea.plan.clusters import get_cluster
    from amalthea.plan.optimizer_published import published_estimates
    from amalthea.plan.optimizer_step import default_gpus, plan_optimizer_step
    from amalthea.plan.optimizer_time import estimate_step

    cluster, num_gpus = get_cluster(cluster_name), gpus or default_gpus(config)
    cluster.check_holds(num_gpus)  # before the longer work
    plan = plan_optimizer_step(config, num_gpus=num_gpus)
    estimate, published = estimate_step(plan, config, cluster), published_estimates(config.model)
    document = {**plan.to_json(), **estimate.to_json(), "published": [figure.to_json() for figure in published]}
    if picture is not None:
        from amalthea.report.optimizer_load import write_load_picture

        write_load_picture(plan, picture, title=config.recipe, flops_per_s=estimate.flops_per_s)
        document["picture"] = str(picture)
    return document, optimizer_tables(plan, estimate, published)


def _parameters(counted: Accounting) -> Table:
    made = table("parameters", "part", "exact", "")
    parts = counted.to_json()["params_by_part"]
    rows = {name.replace("_", " "): count for name, count in parts.items() if count}
    rows |= {
        "total": counted.total_params,
        "active per token": counted.active_params,
        "active, input embedding left out": counted.active_params_without_embedding,
    }
    _add_counts(made, rows)
    return made


def _flops(counted: Accounting) -> Table:
    flops = counted.flops_per_token
    made = table("FLOP per token", "part", "exact", "")
    linear = counted.to_json()["flops_per_token"]["linear_forward"]
    rows = {f"forward, {name.replace('_', ' ')}": count for name, count in linear.items() if count}
    rows["forward, all linear"] = flops.linear_forward.total
    for context in (flops.full_causal, flops.documents):
        if context is not None:
            of = f"documents of {context.context_tokens:,}"
            rows[f"forward, attention over {of}"] = context.attention_forward
            rows[f"forward and backward, {of}"] = context.model_total
            rows[f"the same with full recompute, {of}"] = context.full_recompute_total
    _add_counts(made, rows)
    return made


def _state(counted: Accounting) -> Table:
    from amalthea.core.units import format_bytes

    made = table("state of one replica (estimate)", "part", "bytes", "")
    for name, num_bytes in counted.to_json()["state_bytes"].items():
        made.add_row(name.replace("_", " "), f"{num_bytes:,}", format_bytes(num_bytes))
    return made


def _add_counts(made: Table, rows: dict[str, int]) -> None:
    from amalthea.core.units import format_count

    for name, count in rows.items():
        made.add_row(name, f"{count:,}", format_count(count))
