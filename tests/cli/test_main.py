"""The command line says what is wrong on one line each, and comes at once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import amalthea
from amalthea.cli import main as cli
from amalthea.core.errors import ConfigError, DataError, TrainingError


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, standard output, and the lines of standard error."""
    code = cli.run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for command in ("train", "plan", "generate", "recipes", "data"):
        assert command in result.output
    assert CliRunner().invoke(cli.app, ["train", "--help"]).exit_code == 0


def test_help_comes_at_once_and_without_torch() -> None:
    program = "import sys, amalthea.cli.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-m", "amalthea", "--help"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0
    assert "train" in result.stdout
    # Time on the processor: the wall's would tell how busy the machine is.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "--version") == (0, f"amalthea {amalthea.__version__}\n", [])


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer(capsys)
    assert (code, err) == (0, [])
    assert "Usage" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "error: no such command 'trian'; did you mean 'train'? (see `amalthea --help`)"),
        (["train"], "error: missing argument 'RECIPE' (see `amalthea train --help`)"),
        (["generate", "x"], "error: missing option '--prompt' (see `amalthea generate --help`)"),
        (
            ["train", "quickstart", "--train.steps=3"],
            "error: no such option: --train.steps; overrides have no dashes: train.steps=VALUE "
            "(see `amalthea train --help`)",
        ),
        (
            ["train", "quikstart"],
            "error: unknown recipe 'quikstart'; did you mean quickstart? recipes are quickstart, moe-small, "
            "europa-1t, or path.py:function",
        ),
        (["plan", "quickstart", "steps=3"], "error: unknown key steps; did you mean train.steps?"),
        (
            ["train", "quickstart", "parallel.ep=3", "--dry-run"],
            "error: parallel.ep is 3, but must divide both parallel.dp_shard 1 and model.moe.num_experts 16; valid: 1",
        ),
    ],
)
def test_a_user_s_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert answer(capsys, *arguments) == (2, "", [line])


def test_every_problem_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, lines = answer(capsys, "train", "quickstart", "train.stepz=3", "seed=x", "optim.experts=sgd")
    assert code == 2
    assert lines == [
        "error: unknown key train.stepz; did you mean train.steps?",
        "error: seed is 'x'; expected a whole number of at least 0",
        "error: optim.experts is 'sgd'; expected muon or adamw",
    ]


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (DataError("a\n   b"), 2, ["error: a b"]),
        (TrainingError("x" * 500), 1, ["error: " + "x" * 500]),
        (ConfigError("one [red]", "two"), 2, ["error: one [red]", "error: two"]),
        (KeyboardInterrupt(), 130, []),
    ],
)
def test_what_a_command_raises(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    lines: list[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("amalthea.recipes.registry.load_recipe", fail)
    assert answer(capsys, "plan", "quickstart") == (code, "", lines)


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amalthea.recipes.registry.load_recipe", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.run(["plan", "quickstart"])


def test_plan_prints_exact_counts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "plan", "europa-1t", "--json")
    model = json.loads(out)["model"]
    assert code == 0
    assert model["total_params"] == 951_874_634_240
    assert model["active_params"] == 32_843_907_584
    assert model["flops_per_token"]["linear_forward_total"] == pytest.approx(62.5e9, rel=1e-3)
    code, out, _ = answer(capsys, "plan", "europa-1t", "--document-tokens", "8192")
    assert code == 0
    for figure in ("951,874,634,240", "951.9 B", "32.8 B", "62.5 B", "documents of 8,192"):
        assert figure in out


def test_plan_takes_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, "plan", "quickstart", "model.num_layers=2", "--json")
    assert json.loads(out)["model"]["total_params"] < 8_566_720


def test_recipes_are_listed_with_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, "recipes")
    for text in ("quickstart", "moe-small", "europa-1t", "951.9 B", "7.0 B"):
        assert text in out
    _, out, _ = answer(capsys, "recipes", "--json")
    rows = {row["name"]: row for row in json.loads(out)["recipes"]}
    assert rows["europa-1t"]["total_params"] == 951_874_634_240
    assert all(row["description"] for row in rows.values())


def test_a_dry_run_prints_configuration_and_layout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = answer(capsys, "train", "quickstart", "seed=5", "--dry-run")
    assert code == 0
    assert "optim.adamw.lr" in out
    assert "accumulation_steps" in out
    _, out, _ = answer(capsys, "train", "quickstart", "seed=5", "--dry-run", "--json")
    printed = json.loads(out)
    assert printed["config"]["seed"] == 5
    assert printed["layout"]["num_data_ranks"] == 1
    assert not list(tmp_path.iterdir())


def test_only_rank_0_says_what_all_ranks_meet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert answer(capsys, "train", "quikstart") == (2, "", [])
    monkeypatch.setenv("RANK", "0")
    assert len(answer(capsys, "train", "quikstart")[2]) == 1


def test_a_folder_that_is_no_run_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, lines = answer(capsys, "generate", str(tmp_path), "--prompt", "x")
    assert code == 2
    assert lines == [f"error: {tmp_path}/config.json does not exist; expected the folder of a run that was started"]
