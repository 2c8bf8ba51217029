"""Whatever a user gets wrong: one line that says what, the right exit code, and nothing lost or left behind."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import VOCAB_SIZE, Places, WholeRun, run_config, write_recipe

from amalthea.cli.main import run

Files = dict[str, bytes]

FOUR_RANKS = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""As torchrun would say; what is refused is refused before anybody is met there."""


class Command:
    """`amalthea …` in this process."""

    def __init__(self, recipe: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.recipe, self.run_dir, self._capsys = recipe, run_dir, capsys

    def __call__(self, *arguments: str | Path, code: int) -> str:
        """Runs it, and returns the one line on standard error."""
        self._capsys.readouterr()
        found = run([str(argument) for argument in arguments])
        said = self._capsys.readouterr()
        assert found == code, said.err
        lines = said.err.splitlines()
        assert len(lines) == 1, said.err
        assert lines[0].startswith("error: ")
        assert "Traceback" not in said.out
        return lines[0]

    def train(self, *overrides: str, run_dir: Path | None = None, code: int = 2) -> str:
        return self("train", self.recipe, *overrides, "--run-dir", run_dir or self.run_dir, code=code)


@pytest.fixture
def command(places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    recipe = write_recipe(tmp_path / "recipe", run_config(places.corpus))
    return Command(recipe, tmp_path / "run", capsys)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", r"unknown key train\.step; did you mean train\.steps\?"),
        ("optim.learning_rate=3", r"unknown key optim\.learning_rate; did you mean .*optim\.adamw\.lr"),
        ("train.steps=many", r"train\.steps is 'many'; expected a whole number above 0"),
        ("model.moe.top_k=9", r"model\.moe: top_k is 9, more than num_experts 8; lower top_k"),
        ("data.path=nowhere", r"corpus nowhere does not exist; set data\.path to a folder of \.txt and \.jsonl files"),
        ("model.vocab_size=500", r"model\.vocab_size is 500, but .*data\.tokenizer\.vocab_size 389; set both"),
        ("data.seq_len=64", r"data\.seq_len is 64, more than model\.max_seq_len 32; set model\.max_seq_len=64 or"),
        ("data.tokenizer.path=t.json", r"tokenizer t\.json cannot be read: No such file"),
        ('data.weights={"fr": 1}', r"data\.weights names 'fr', which has no training text; valid: bg, de, mt"),
    ],
)
def test_a_wrong_setting(override: str, message: str, command: Command) -> None:
    assert re.search(message, command.train(override))
    assert not command.run_dir.exists()


@pytest.mark.case(10)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.ep=3", r"parallel\.ep is 3, but must divide both .*4 and .*num_experts 8; valid: 1, 2, 4$"),
        ("model.moe.num_experts=6 parallel.ep=4", r"parallel\.ep is 4, but must divide .*num_experts 6; valid: 1, 2$"),
        ("parallel.dp_replicate=3", r"parallel\.dp_replicate is 3, which does not divide the 4 ranks.*: 1, 2, 4$"),
        ("parallel.dp_shard=3", r"parallel\.dp_shard 3 make 3 ranks, but this run has 4; set parallel\.dp_shard=auto"),
        ("train.global_batch_tokens=192", r"is 192, but must be a multiple of .*= 128; nearest: 128, 256$"),
    ],
)
def test_a_layout_that_does_not_fit_four_ranks(
    override: str, message: str, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in FOUR_RANKS.items():
        monkeypatch.setenv(name, value)
    assert re.search(message, command.train(*override.split()))
    monkeypatch.setenv("RANK", "3")
    assert run(["train", command.recipe, *override.split(), "--run-dir", str(command.run_dir)]) == 2
    assert capsys.readouterr().err == "", "one rank speaks for all"
    assert not command.run_dir.exists()


@pytest.mark.parametrize(
    ("files", "overrides", "message"),
    [
        ({}, "", r"corpus \S+ holds no \.txt or \.jsonl file; put text there or set data\.path"),
        ({"de.txt": b" \n"}, "", r"corpus \S+ is empty: its files hold no text"),
        ({"de.txt": b"gut\nnicht \xff gut\n"}, "", r"de\.txt:2: not valid UTF-8 .*; convert the file"),
        ({"de.jsonl": b'{"text": "a"}\n{"text": \n'}, "", r"de\.jsonl:2: not valid JSON .*; each line is one object"),
        ({"de.jsonl": b'{"txt": "a"}\n'}, "", r'de\.jsonl:1: no `text`, expected an object like \{"text": "…"\}'),
        ({"de.txt": b"hello"}, "", r"vocabulary of 262 tokens, asked for 389; set data\.tokenizer\.vocab_size=262"),
        (
            {"de.txt": b"hello"},
            "data.tokenizer.vocab_size=258 model.vocab_size=258",
            r"the corpus has 7 training tokens, fewer than one sequence of data\.seq_len=32; bring more text or",
        ),
    ],
)
def test_a_corpus_that_cannot_be_used(
    files: Files, overrides: str, message: str, command: Command, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, data in files.items():
        (corpus / name).write_bytes(data)
    said = command.train(f"data.path={corpus}", *overrides.split())
    assert re.search(message, said), said
    assert not command.run_dir.exists(), "so that the same folder can be named once the text is mended"


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 1, VOCAB_SIZE - 1])
def test_a_vocabulary_that_is_not_the_tokenizers(vocab_size: int, command: Command, whole_run: WholeRun) -> None:
    tokenizer = whole_run(1) / "tokenizer.json"
    said = command.train(f"data.tokenizer.path={tokenizer}", f"model.vocab_size={vocab_size}")
    expected = f"model.vocab_size is {vocab_size}, but the tokenizer has 389 tokens; set model.vocab_size=389"
    assert said == f"error: {expected}"
    assert not command.run_dir.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(command: Command) -> None:
    assert re.search(r"device=cuda, but torch \S+ finds no GPU; use device=cpu, or", command.train("device=cuda"))


def test_no_network_for_the_demo_corpus(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said = command.train("data.path=demo")
    assert said.startswith("error: the demo corpus could not be fetched: pip failed (")
    assert said.endswith("to train on your own text, put .txt or .jsonl files in a folder and set data.path=DIR")
    assert not command.run_dir.exists()


# Run folders


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("model.num_layers=3", "model.num_layers 2 → 3"),
        ("optim.adamw.lr=0.1", "optim.adamw.lr 0.001 → 0.1"),
        ("seed=8", "seed 7 → 8"),
    ],
)
def test_the_folder_of_another_run(
    override: str, difference: str, command: Command, whole_run: WholeRun, tmp_path: Path
) -> None:
    run_dir = Path(shutil.copytree(whole_run(1), tmp_path / "taken"))
    said = command.train(override, run_dir=run_dir)
    assert said == f"error: {run_dir} holds another run: {difference}; name another --run-dir or keep these settings"
    assert tree(run_dir) == tree(whole_run(1))


def test_text_that_has_changed_since(command: Command, places: Places, tmp_path: Path) -> None:
    """It would train another tokenizer, and the weights would go on with tokens that mean something else."""
    corpus, run_dir = Path(shutil.copytree(places.corpus, tmp_path / "corpus")), command.run_dir
    short = (f"data.path={corpus}", "train.validate_every_steps=none", "optim.schedule.warmup_steps=0")
    assert run(["train", command.recipe, *short, "train.steps=1", "--run-dir", str(run_dir)]) == 0
    before = tree(run_dir)
    with (corpus / "de.jsonl").open("a") as file:
        file.write('{"text": "Noch ein Satz."}\n')
    said = command.train(*short, "train.steps=2")
    assert said.startswith(f"error: {run_dir} was trained on other text than data.path {corpus} holds now; bring that")
    assert tree(run_dir) == before


def test_a_run_folder_that_is_a_file(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for run_dir in (file, file / "run"):
        said = command.train(run_dir=run_dir)
        assert said == f"error: --run-dir {run_dir}: {file} is a file, not a folder; name another --run-dir"
    assert file.read_text() == "mine"


def test_a_run_folder_that_cannot_be_written(command: Command, read_only: Path) -> None:
    said = command.train(run_dir=read_only / "run")
    assert said.startswith(f"error: --run-dir {read_only / 'run'}: {read_only} cannot be written; give write access")


def test_resume_never_refuses_a_folder_with_checkpoints(command: Command, whole_run: WholeRun, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(whole_run(1), tmp_path / "taken"))
    said = command.train("checkpoint.resume=never", run_dir=run_dir)
    assert re.search(r"already holds the checkpoint step_8, and checkpoint\.resume is never; name another", said)


def test_a_run_that_diverges_fails_as_training(command: Command) -> None:
    said = command.train("optim.adamw.lr=1e30", "optim.schedule.warmup_steps=0", code=1)
    assert re.search(r"of this step is not finite; .* resume from the last checkpoint", said)


# Generating


@pytest.mark.parametrize(
    ("spoil", "arguments", "message"),
    [
        (shutil.rmtree, (), r"config\.json does not exist|does not exist; expected the folder of a run"),
        (lambda run: (run / "config.json").unlink(), (), r"config\.json does not exist; expected the folder of a run"),
        (lambda run: shutil.rmtree(run / "checkpoints"), (), r"holds no whole checkpoint; train it first with"),
        (lambda run: (run / "tokenizer.json").unlink(), (), r"tokenizer \S+ cannot be read: No such file"),
        (lambda run: None, ("--checkpoint", "5"), r"has no checkpoint of step 5; there are: step_3, step_6, step_8"),
        (lambda run: None, ("--temperature", "-1"), r"temperature is -1\.0; give 0 or more"),
        (
            lambda run: (run / "checkpoints/step_6/__0_0.distcp").write_bytes(b"x"),
            ("--checkpoint", "6"),
            r"step_6 is not whole: __0_0\.distcp has 1 bytes instead of \d+; leave the step out",
        ),
        (lambda run: None, ("--prompt", "\udcff"), r"--prompt is not valid UTF-8"),
    ],
)
def test_what_cannot_be_generated_from(
    spoil: Callable[[Path], Any],
    arguments: tuple[str, ...],
    message: str,
    command: Command,
    whole_run: WholeRun,
    tmp_path: Path,
) -> None:
    run_dir = Path(shutil.copytree(whole_run(1), tmp_path / "spoiled"))
    spoil(run_dir)
    said = command("generate", run_dir, "--prompt", "a", *arguments, code=2)
    assert re.search(message, said), said
