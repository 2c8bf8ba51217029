"""Whole runs of a model small enough for tests: their corpus, how they are started, and what they leave on disk.

A run is started in one of three ways, which all go through `amalthea.launch`: `run_inside` on ranks of the fork pool
(milliseconds), `amalthea.cli.main.run` in the test's own process, or `amalthea(...)` as a process of its own.

A *blow* is what a test does to a run from outside, always at the same place: right after the metrics row of a step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from amalthea.checkpoint.storage import read_metadata
from amalthea.checkpoint.store import load
from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.world import World
from amalthea.data.batch import Batch
from amalthea.data.dataset import TrainData
from amalthea.launch import train as launcher
from amalthea.train.records import Recorder, StepRecord
from support.corpora import made_up_texts, write_corpus
from support.tiny import tiny_config

LANGUAGES = ("bg", "de", "mt")
VOCAB_SIZE = 389
"""Odd and prime, so that no number of ranks divides it."""
STEPS = 8
SAVE_EVERY = 3
BLOW_AFTER = 5
"""Runs save after steps 3, 6 and 8. What comes down on them comes after step 5, two steps from the last save."""

WholeRun = Callable[..., Path]
"""See the fixture `whole_run`."""


@dataclass(frozen=True)
class Places:
    """Folders of the whole session."""

    corpus: Path
    cache: Path


# Starting runs


def make_corpus(folder: Path) -> Path:
    """Three languages; two are `.jsonl` files and one is a folder of `.txt` files."""
    write_corpus(folder, {language: made_up_texts(language, documents=30) for language in LANGUAGES[:2]})
    (folder / LANGUAGES[2]).mkdir()
    for number, text in enumerate(made_up_texts(LANGUAGES[2], documents=30)):
        (folder / LANGUAGES[2] / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def run_config(corpus: Path, **overrides: Any) -> RunConfig:
    """`tiny_config` with Muon, on a corpus, with validation, checkpoints and a schedule; overrides are `a__b=c`."""
    chosen: dict[str, Any] = {
        "model__vocab_size": VOCAB_SIZE,
        "model__moe__bias_update_rate": 0.01,
        "data__path": str(corpus),
        "data__tokenizer__vocab_size": VOCAB_SIZE,
        "data__val_tokens_per_language": 60,
        "train__steps": STEPS,
        "train__microbatch_sequences": 2,
        "train__validate_every_steps": 4,
        "optim__experts": "muon",
        "optim__matrices": "muon",
        "optim__schedule__warmup_steps": 2,
        "checkpoint__every_steps": SAVE_EVERY,
        "checkpoint__keep": 9,
        "logging__tensorboard": False,
    }
    return tiny_config(**chosen | overrides)


@contextmanager
def blow_after(step: int, blow: Callable[[], None]) -> Iterator[None]:
    """Runs started in this process meanwhile suffer `blow` after the row of `step` is written."""
    record_step = Recorder.step

    def step_and_blow(recorder: Recorder, record: StepRecord) -> None:
        record_step(recorder, record)
        if record.step == step:
            blow()

    with mock.patch.object(Recorder, "step", step_and_blow):
        yield


@dataclass(frozen=True)
class Drawn:
    """One sample that a rank read: its place in the order, and a checksum of its tokens."""

    step: int
    row: int
    crc32: int


@contextmanager
def drawn_samples(log: Path) -> Iterator[None]:
    """Every sample drawn for training goes into `log`, one write each, so that a killed rank leaves its own."""
    batch_of = TrainData.batch

    def batch_and_tell(data: TrainData, step: int, rows: range) -> Batch:
        batch = batch_of(data, step, rows)
        with log.open("ab", buffering=0) as file:
            for row, tokens in zip(rows, batch.tokens, strict=True):
                file.write(f"{step} {row} {zlib.crc32(tokens.numpy().tobytes())}\n".encode())
        return batch

    with mock.patch.object(TrainData, "batch", batch_and_tell):
        yield


def read_drawn(log: Path) -> list[Drawn]:
    return [Drawn(*map(int, line.split())) for line in log.read_text().splitlines()]


@dataclass(frozen=True)
class Blow:
    """A signal that a rank gets after a step."""

    sent: signal.Signals
    rank: int = 0
    step: int = BLOW_AFTER


def run_inside(
    world: World, config: RunConfig, run_dir: Path, cache: Path, blow: Blow | None = None, log: Path | None = None
) -> int:
    """On a rank of the pool: what `amalthea train` does there, less the process group. Returns the exit code.

    Samples drawn go into `log`, with the rank as its suffix.
    """

    def hit() -> None:
        if blow is not None and world.rank == blow.rank:
            os.kill(os.getpid(), blow.sent)

    environment = mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)})
    draws = drawn_samples(log.with_suffix(f".{world.rank}") if log else Path(os.devnull))
    resolved = resolve(config, world_size=world.size)
    with environment, draws, blow_after(blow.step if blow else BLOW_AFTER, hit):
        return launcher._run(config, resolved, world, run_dir=run_dir, say=None, finish=None)


RECIPE = '''"""Recipes for tests: a plain run, and one that a signal hits after a step."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

from amalthea.config.run import RunConfig

until_the_end = ExitStack()


def plain():
    return RunConfig.model_validate_json(Path(__file__).with_name("config.json").read_bytes())


def hit():
    from support.runs import blow_after

    number, step, rank = os.environ["BLOW"].split()
    if os.environ.get("RANK", "0") == rank:
        blow = blow_after(int(step), lambda: os.kill(os.getpid(), signal.Signals[number]))
        until_the_end.enter_context(blow)
    return plain()
'''


def write_recipe(folder: Path, config: RunConfig) -> str:
    """A recipe file; returns `path.py:plain`. `path.py:hit` is the same run hit as BLOW says: `SIGNAL STEP RANK`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "recipe.py").write_text(RECIPE)
    return f"{folder / 'recipe.py'}:plain"


def amalthea(
    *arguments: str | Path, cache: Path, ranks: int = 1, blow: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`amalthea …` as a process, under torchrun where there are several ranks; one thread each."""
    tests = Path(__file__).parents[1]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tests)}
    if blow is not None:
        environment["BLOW"] = blow
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *torchrun, "-m", "amalthea", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=290)


# What runs leave


def rows(run_dir: Path, kind: str) -> dict[int, dict[str, Any]]:
    """Rows of metrics.jsonl by step; each step must be there once, in order."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row) for row in lines if row["kind"] == kind]
    steps = [step for step, _ in found]
    assert steps == sorted(set(steps)), f"{kind} rows of steps {steps}"
    return dict(found)


def curve(run_dir: Path) -> dict[str, Any]:
    """Everything in metrics.jsonl that time has no part in."""
    told = ("loss", "grad_norm", "lr", "muon_lr", "tokens", "expert_imbalance_by_layer", "tokens_by_language")
    training = rows(run_dir, "train")
    validation = rows(run_dir, "validation")
    return {f"train {step}": {name: row[name] for name in told} for step, row in training.items()} | {
        f"validation {step}": {name: row[name] for name in ("loss", "bits_per_byte", "mean_bits_per_byte")}
        for step, row in validation.items()
    }


def losses(run_dir: Path) -> list[float]:
    """Training losses of steps 1, 2, …"""
    found = rows(run_dir, "train")
    assert list(found) == list(range(1, len(found) + 1))
    return [row["loss"] for row in found.values()]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


def checkpoint_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").iterdir())


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    described: dict[str, Any] = read_metadata(path).state_dict_metadata
    tensors = {
        name: torch.full(tuple(entry.size), torch.nan, dtype=entry.properties.dtype)
        for name, entry in described.items()
    }
    load(path, tensors)
    return tensors


def final_state(run_dir: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(run_dir / "checkpoints" / f"step_{max(checkpoint_steps(run_dir))}")


def other_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one of them has, or whose values differ in any bit."""
    return sorted(
        name
        for name in left.keys() | right.keys()
        if name not in left or name not in right or not torch.equal(left[name], right[name])
    )
