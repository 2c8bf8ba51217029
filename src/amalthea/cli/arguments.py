"""Arguments that several commands take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from amalthea.config.run import RunConfig

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe's name (see `amalthea recipes`), or path.py:function.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to change, such as train.steps=100.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]


def load(recipe: str, overrides: list[str] | None) -> RunConfig:
    """The recipe with its overrides. Raises ConfigError."""
    from amalthea.config.overrides import apply_overrides
    from amalthea.recipes.registry import load_recipe

    return apply_overrides(load_recipe(recipe), overrides or [])
