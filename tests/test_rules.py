"""Rules that run: import direction, file length, where the environment is read, docstrings."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from amalthea.core.world import World

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "amalthea"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 450
READS_ENVIRONMENT = ("launch", "cli")
ENVIRONMENT_NAMES = ("environ", "getenv", "environb", "putenv", "unsetenv")


def _layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def _environment_uses(tree: ast.AST) -> list[int]:
    """Lines that name the environment of `os`, as an attribute or by import."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr in ENVIRONMENT_NAMES:
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines.extend(node.lineno for alias in node.names if alias.name in ENVIRONMENT_NAMES)
    return lines


def test_imports_go_down_the_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from importlinter.cli import lint_imports

    monkeypatch.chdir(ROOT)
    code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, is_debug_mode=False)
    assert code == os.EX_OK, capsys.readouterr().out


def test_the_rules_see_the_package() -> None:
    assert PACKAGE / "core" / "world.py" in SOURCES
    assert World.__module__ == "amalthea.core.world"
    offending = "import os\nfrom os import environ\nx = os.getenv('A')\ny = os.environ['A']\nos.path.join('a')\n"
    assert sorted(_environment_uses(ast.parse(offending))) == [2, 3, 4]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_is_short_documented_and_does_not_read_the_environment(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    num_lines = len(text.splitlines())
    assert num_lines <= MAX_LINES, f"{path} has {num_lines} lines; split it (at most {MAX_LINES})"
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{path} opens without a docstring that says what the module is for"
    if _layer(path) not in READS_ENVIRONMENT:
        lines = _environment_uses(tree)
        assert not lines, f"{path} reads the environment at lines {lines}; only launch and cli may"
