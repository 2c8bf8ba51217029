"""Recipes are found by name or in the user's file, and every mistake is one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.recipes.registry import RECIPES, description, load_recipe

GOOD = """
from amalthea.recipes.quickstart import quickstart

def mine():
    return quickstart().model_copy(update={"seed": 7})
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "my_recipe.py"
    path.write_text(text)
    return path


def problem(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(name)
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_are_named_as_they_are_called(name: str) -> None:
    config = load_recipe(name)
    assert isinstance(config, RunConfig)
    assert config.recipe == name
    assert description(RECIPES[name]).endswith(".")


@pytest.mark.parametrize(
    ("name", "meant"), [("quikstart", "quickstart"), ("moe_small", "moe-small"), ("europa", "europa-1t")]
)
def test_an_unknown_name_comes_with_the_close_one_and_the_list(name: str, meant: str) -> None:
    assert problem(name) == (
        f"unknown recipe '{name}'; did you mean {meant}? recipes are quickstart, moe-small, europa-1t, "
        "or path.py:function"
    )


def test_a_name_like_nothing_gets_the_list_only() -> None:
    assert problem("zzz") == "unknown recipe 'zzz'; recipes are quickstart, moe-small, europa-1t, or path.py:function"


def test_a_function_of_the_user_s_file(tmp_path: Path) -> None:
    before = list(sys.path)
    assert load_recipe(f"{write(tmp_path, GOOD)}:mine").seed == 7
    assert sys.path == before


def test_the_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_recipe.py").write_text("SEED = 11\n")
    text = GOOD.replace("7", "SEED").replace("def mine", "from neighbour_of_recipe import SEED\ndef mine")
    assert load_recipe(f"{write(tmp_path, text)}:mine").seed == 11


@pytest.mark.parametrize(
    ("text", "function", "line"),
    [
        (GOOD, "mien", "has no function 'mien'; did you mean {path}:mine?"),
        ("x = 1\n", "mine", "has no function 'mine'; its functions are none"),
        ("def mine(:\n", "mine", "is not Python: invalid syntax (line 1)"),
        ("import no_such_module\n", "mine", "raised ModuleNotFoundError: No module named 'no_such_module' (line 1)"),
        ("def mine():\n    return {}['steps']\n", "mine", "{path}:mine raised KeyError: 'steps' (line 2)"),
        ("def mine():\n    return 3\n", "mine", "{path}:mine returned int; expected a RunConfig"),
        ("def mine(size):\n    pass\n", "mine", "{path}:mine needs the argument size; a recipe is called without any"),
        ("mine = 3\n", "mine", "has no function 'mine'"),
        (
            "from amalthea.model.config import MoEConfig\ndef mine():\n"
            "    return MoEConfig(num_experts=0, top_k=1, expert_hidden_size=1)\n",
            "mine",
            "{path}:mine: model.moe.num_experts is 0; expected a whole number above 0",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_file_is_said(tmp_path: Path, text: str, function: str, line: str) -> None:
    path = write(tmp_path, text)
    found = problem(f"{path}:{function}")
    assert line.format(path=path) in found
    assert str(path) in found


def test_a_missing_file_and_a_missing_function_name(tmp_path: Path) -> None:
    path = tmp_path / "none.py"
    assert problem(f"{path}:f") == f"recipe file {path} does not exist; expected path.py:function"
    assert problem("mine.py") == "recipe mine.py names no function; write mine.py:FUNCTION"


def test_a_config_error_of_the_recipe_passes_through(tmp_path: Path) -> None:
    text = "from amalthea.core.errors import ConfigError\ndef mine():\n    raise ConfigError('set HOME first')\n"
    assert problem(f"{write(tmp_path, text)}:mine") == "set HOME first"
