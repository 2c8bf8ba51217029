"""`amalthea plan`: what a model costs, by arithmetic alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from amalthea.cli.arguments import JsonOption, OverridesArgument, RecipeArgument, load
from amalthea.cli.console import output, print_json, table

if TYPE_CHECKING:
    from rich.table import Table

    from amalthea.plan.accounting import Accounting


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
    json: JsonOption = False,
) -> None:
    """Count a recipe's parameters, FLOP per token and bytes of state exactly; nothing is built."""
    from amalthea.plan.accounting import account

    config = load(recipe, overrides)
    counted = account(config.model, seq_len=config.data.seq_len, document_len=document_tokens, optim=config.optim)
    if json:
        print_json({"recipe": config.recipe, "seq_len": config.data.seq_len, "model": counted.to_json()})
        return
    console = output()
    for part in (_parameters(counted), _flops(counted), _state(counted)):
        console.print(part)
        console.print()


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
