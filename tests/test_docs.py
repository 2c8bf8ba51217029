"""What the README and the guides say can be run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from support.run_records import record_run

from amalthea.cli.main import app
from amalthea.config.overrides import apply_overrides
from amalthea.recipes.registry import RECIPES, load_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fences(page: Path, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every `amalthea …` line of a fence, as (page, words), comments and what is elided left out."""
    for page in PAGES:
        for fence in fences(page, ""):
            for line in fence.splitlines():
                line = line.strip().removeprefix("$ ")
                if found := re.search(r"(?:^|-m |\d )amalthea (.*?)(?:  +|…|;|$)", line):
                    words = shlex.split(found[1]) if found[1].count('"') % 2 == 0 else found[1].split()
                    if words:
                        yield page.name, words


@pytest.mark.parametrize(
    ("page", "words"), commands(), ids=lambda value: " ".join(value) if isinstance(value, list) else value
)
def test_commands_exist_and_their_overrides_hold(page: str, words: list[str]) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert words[0] in known
    overrides = [word for word in words[2:] if "=" in word and not word.startswith("-")]
    if words[1:] and words[1] in RECIPES and "learning_rate" not in " ".join(overrides):
        apply_overrides(load_recipe(words[1]), overrides)


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "python")], ids=lambda page: page.name)
def test_python_of_the_guides_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_run(tmp_path / "runs" / "quickstart", steps=3)
    monkeypatch.chdir(tmp_path)
    for number, code in enumerate(fences(page, "python")):
        names: dict[str, object] = {"__name__": f"guide_{number}"}
        exec(compile(code, str(page), "exec"), names)
        for name, value in names.items():
            if callable(value) and getattr(value, "__module__", None) == f"guide_{number}":
                assert value() is not None, f"{name} of {page.name} returned nothing"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
