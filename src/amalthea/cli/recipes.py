"""`amalthea recipes`."""

from __future__ import annotations

from amalthea.cli.arguments import JsonOption
from amalthea.cli.console import output, print_json, table


def recipes_command(json: JsonOption = False) -> None:
    """List the shipped recipes with their sizes."""
    from amalthea.core.units import format_count
    from amalthea.plan.accounting import account
    from amalthea.recipes.registry import RECIPES, description

    rows = []
    for name, recipe in RECIPES.items():
        config = recipe()
        counted = account(config.model, seq_len=config.data.seq_len, optim=config.optim)
        rows.append(
            {
                "name": name,
                "description": description(recipe),
                "total_params": counted.total_params,
                "active_params": counted.active_params,
            }
        )
    if json:
        print_json({"recipes": rows})
        return
    made = table("recipes", "name", "parameters", "active", "")
    made.columns[3].justify = "left"
    for row in rows:
        sizes = (format_count(row["total_params"]), format_count(row["active_params"]))
        made.add_row(row["name"], *sizes, row["description"])
    output().print(made)
