"""`amalthea train` from start to exit code, on real text in a folder of the user's own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from amalthea.cli.main import run
from amalthea.config.load import load_config

RECIPE = """
from amalthea.config.run import LoggingConfig, RunConfig, TrainConfig
from amalthea.data.config import DataConfig, TokenizerConfig
from amalthea.model.config import ModelConfig, MoEConfig
from amalthea.optim.config import OptimConfig


def tiny():
    return RunConfig(
        recipe="tiny",
        device="cpu",
        model=ModelConfig(
            vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
            moe=MoEConfig(num_experts=4, top_k=2, expert_hidden_size=8), max_seq_len=32,
        ),
        data=DataConfig(path="text", seq_len=16, tokenizer=TokenizerConfig(vocab_size=300), val_tokens_per_language=32),
        train=TrainConfig(steps=4, global_batch_tokens=64, microbatch_sequences=4, validate_every_steps=4),
        optim=OptimConfig(matrices="adamw"),
        logging=LoggingConfig(every_steps=1, tensorboard=False),
    )
"""
TEXTS = {
    "en": "the peoples of the union shall have the right to read what was decided in their name",
    "mt": "il-popli tal-unjoni għandhom id-dritt li jaqraw dak li ġie deċiż f'isimhom",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, two languages of text, and a cache of its own."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "mine.py").write_text(RECIPE)
    (folder / "text").mkdir()
    draw = random.Random(0)
    for language, text in TEXTS.items():
        documents = [{"text": " ".join(draw.choices(text.split(), k=draw.randint(5, 40)))} for _ in range(60)]
        lines = "".join(json.dumps(document) + "\n" for document in documents)
        (folder / "text" / f"{language}.jsonl").write_text(lines)
    return folder


@pytest.fixture(autouse=True)
def _inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))


def test_a_run_leaves_a_folder_that_tells_all(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "mine.py:tiny", "seed=3"]) == 0
    (folder,) = (place / "runs").glob("tiny-*")
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json", "manifest.json", "metrics.jsonl", "events.jsonl", "checkpoints", "plots", "tokenizer.json",
    }  # fmt: skip
    assert load_config(folder).seed == 3
    assert (folder / "plots" / "loss.png").stat().st_size > 1000
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]
    assert json.loads((folder / "manifest.json").read_text())["chosen"]["parallel.dp_shard"] == 1
    out = capsys.readouterr().out
    assert "4 of 4" in out
    assert f"amalthea generate runs/{folder.name}" in out


def test_json_stands_alone_on_standard_output_and_the_run_generates(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "mine.py:tiny", "--run-dir", "named", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 4
    assert "step" in captured.err
    told = []
    for _ in range(2):
        assert run(["generate", "named", "--prompt", "the peoples", "--max-tokens", "5", "--seed", "1"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert told[0].startswith("the peoples")
    assert run(["generate", "named", "--prompt", "x", "--checkpoint", "5"]) == 2
    assert "step_4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["data.path=nowhere"], "nowhere"),
        (["data.path=empty"], "empty"),
        (["--run-dir", "mine.py"], "mine.py is a file, not a folder; name another --run-dir"),
        (["model.vocab_size=512"], "model.vocab_size is 512, but the tokenizer is trained to"),
        (["data.tokenizer.path=other.json"], "but the tokenizer has 290 tokens; set model.vocab_size=290"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_and_leaves_no_run(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    (place / "empty").mkdir(exist_ok=True)
    if "other.json" in arguments[0]:
        _write_tokenizer(place / "other.json", vocab_size=290)
    before = sorted(path.name for path in place.iterdir())
    assert run(["train", "mine.py:tiny", "--run-dir", "unmade", *arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert line in errors[0]
    assert sorted(path.name for path in place.iterdir() if path.name != "cache") == [n for n in before if n != "cache"]


def _write_tokenizer(path: Path, *, vocab_size: int) -> None:
    from amalthea.data.tokenizer import Tokenizer

    Tokenizer.train(list(TEXTS.values()) * 3, vocab_size=vocab_size).save(path)
