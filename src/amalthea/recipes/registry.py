"""Finds a recipe: one of ours by name, or a function of the user's own Python file, which is executed."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from amalthea.config.explain import explain
from amalthea.config.run import RunConfig
from amalthea.core.errors import AmaltheaError, ConfigError
from amalthea.recipes.europa_1t import europa_1t
from amalthea.recipes.moe_small import moe_small
from amalthea.recipes.quickstart import quickstart

Recipe = Callable[[], RunConfig]

RECIPES: dict[str, Recipe] = {"quickstart": quickstart, "moe-small": moe_small, "europa-1t": europa_1t}


def load_recipe(name: str) -> RunConfig:
    """The configuration of a recipe: a name of `RECIPES`, or `path.py:function`.

    The file of `path.py:function` is the user's own Python and is executed, its folder importable meanwhile.

    Raises:
        ConfigError: unknown name (with suggestions); no such file or function; the file or the function
            raises; the function returns something else than a `RunConfig`.
    """
    if name in RECIPES:
        return RECIPES[name]()
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _load_from_file(Path(path), function)
    if name.endswith(".py"):
        raise ConfigError(f"recipe {name} names no function; write {name}:FUNCTION")
    close = difflib.get_close_matches(name.replace("_", "-"), RECIPES, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]}?" if close else ";"
    raise ConfigError(f"unknown recipe {name!r}{meant} recipes are {', '.join(RECIPES)}, or path.py:function")


def description(recipe: Recipe) -> str:
    """The first line of a recipe's docstring."""
    return (inspect.getdoc(recipe) or "").partition("\n")[0]


def _load_from_file(path: Path, name: str) -> RunConfig:
    if not path.is_file():
        raise ConfigError(f"recipe file {path} does not exist; expected path.py:function")
    with _importable(path.resolve().parent):
        module = _execute(path)
        recipe = getattr(module, name, None)
        if not callable(recipe):
            raise ConfigError(_no_function(path, name, module))
        where = f"recipe {path}:{name}"
        config = _call(recipe, where, path)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{where} returned {type(config).__name__}; expected a RunConfig")
    return config


def _execute(path: Path) -> ModuleType:
    # A name of its own, so that a recipe file called `math.py` shadows nothing.
    spec = importlib.util.spec_from_file_location(f"amalthea_recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes defined in the file look their module up
    with _explained(f"recipe file {path}", path):
        spec.loader.exec_module(module)
    return module


def _call(recipe: Callable[..., Any], where: str, path: Path) -> Any:
    for parameter in inspect.signature(recipe).parameters.values():
        optional = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not optional:
            raise ConfigError(f"{where} needs the argument {parameter.name}; a recipe is called without any")
    with _explained(where, path):
        return recipe()


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def _explained(where: str, path: Path) -> Iterator[None]:
    """Whatever the user's code raises becomes one line with the last place in their file."""
    try:
        yield
    except AmaltheaError:
        raise
    except ValidationError as error:
        raise ConfigError(*(f"{where}: {line}" for line in explain(error))) from error
    except SyntaxError as error:
        raise ConfigError(f"{where} is not Python: {error.msg} (line {error.lineno})") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        place = f" (line {lines[-1]})" if lines else ""
        raise ConfigError(f"{where} raised {type(error).__name__}: {error}{place}") from error


def _no_function(path: Path, name: str, module: ModuleType) -> str:
    functions = [
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    close = difflib.get_close_matches(name, functions, n=1)
    if close:
        return f"recipe file {path} has no function {name!r}; did you mean {path}:{close[0]}?"
    return f"recipe file {path} has no function {name!r}; its functions are {', '.join(functions) or 'none'}"
