"""What can be done with a run once it has ended: start it again, go on for longer, generate text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.runs import (
    STEPS,
    Places,
    WholeRun,
    checkpoint_steps,
    curve,
    events,
    final_state,
    other_bits,
    rows,
    run_config,
    run_inside,
    write_recipe,
)

from amalthea.cli.main import run


def test_a_finished_run_says_so_and_changes_nothing(
    places: Places, whole_run: WholeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(whole_run(1), tmp_path / "run"))
    recipe = write_recipe(tmp_path, run_config(places.corpus))
    assert run(["train", recipe, "--run-dir", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert f"nothing to do: {STEPS} steps are done; set train.steps higher than {STEPS} to go on" in said.splitlines()
    assert "run finished" in said
    assert [event["step"] for event in events(run_dir, "finished")] == [STEPS, STEPS]
    unchanged = ["metrics.jsonl", "config.json", "tokenizer.json"]
    unchanged += [str(path.relative_to(run_dir)) for path in run_dir.glob("checkpoints/*/*")]
    for name in unchanged:
        assert (run_dir / name).read_bytes() == (whole_run(1) / name).read_bytes(), name


def test_a_finished_run_goes_on_when_it_is_given_more_steps(
    places: Places, whole_run: WholeRun, tmp_path: Path
) -> None:
    """Exactly, where the schedule does not hang on the number of steps."""
    constant = {"optim__schedule__kind": "constant", "optim__schedule__warmup_steps": 2}
    run_dir = Path(shutil.copytree(whole_run(1, **constant), tmp_path / "run"))
    longer = run_config(places.corpus, train__steps=10, **constant)
    assert run_ranks(1, run_inside, longer, run_dir, places.cache) == [0]
    whole = whole_run(1, train__steps=10, **constant)
    assert list(rows(run_dir, "train")) == list(range(1, 11))
    assert checkpoint_steps(run_dir) == [3, 6, 8, 9, 10]
    assert curve(run_dir) == curve(whole)
    assert other_bits(final_state(run_dir), final_state(whole)) == []


def text_of(capsys: pytest.CaptureFixture[str], run_dir: Path, *arguments: str, prompt: str = "абв") -> str:
    capsys.readouterr()
    assert run(["generate", str(run_dir), "--prompt", prompt, "--max-tokens", "24", *arguments]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith(prompt)
    assert said.out.endswith("\n")
    return said.out.removeprefix(prompt)


def test_generated_text_hangs_on_the_seed(whole_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text_of(capsys, whole_run(1), "--seed", seed) for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert text_of(capsys, whole_run(1), "--seed", "1", "--checkpoint", "8") == texts[0]
    assert text_of(capsys, whole_run(1), "--seed", "1", prompt="").strip(), "a text from its very beginning"


def test_the_likeliest_text_is_the_same_however_many_ranks_trained(
    whole_run: WholeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = [whole_run(1), whole_run(4), whole_run(4, parallel__ep=4)]
    texts = [text_of(capsys, run_dir, "--temperature", "0") for run_dir in trained]
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) > 12
