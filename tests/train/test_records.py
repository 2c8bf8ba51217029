"""Rows are whole JSON, each step stands once however often the run dies, and only rank 0 writes."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.run_records import LANGUAGES, step_record, validation_record

from amalthea.config.run import LoggingConfig
from amalthea.core.errors import MissingDependencyError, TrainingError
from amalthea.core.world import World
from amalthea.train.records import Recorder

QUIET = LoggingConfig(tensorboard=False, every_steps=5)
TRAIN_KEYS = {
    "kind", "time", "step", "loss", "aux_loss", "z_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s",
    "data_s", "peak_allocated_bytes", "peak_reserved_bytes", "stranded_bytes", "num_alloc_retries",
    "expert_imbalance", "expert_imbalance_by_layer", "tokens_dropped", "tokens_by_language",
}  # fmt: skip


def recorder(folder: Path, **changes: Any) -> Recorder:
    given = {"world": World(), "logging": QUIET, "total_steps": 12, "console": Console(quiet=True)}
    return Recorder(folder, **(given | changes))


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=no_constants) for line in path.read_text(encoding="utf-8").splitlines()]


def steps(folder: Path, kind: str) -> list[int]:
    return [row["step"] for row in rows(folder / "metrics.jsonl") if row["kind"] == kind]


def record(target: Recorder, *, first: int, last: int, validate_at: tuple[int, ...] = ()) -> None:
    for step in range(first, last + 1):
        if step:
            target.step(step_record(step, total=12))
        if step in validate_at:
            target.validation(validation_record(step))


def test_rows_carry_the_promised_keys(tmp_path: Path) -> None:
    with recorder(tmp_path) as target:
        record(target, first=0, last=12, validate_at=(0,))
    first, *train = rows(tmp_path / "metrics.jsonl")
    assert first["kind"] == "validation"
    assert first["step"] == 0
    assert list(first["bits_per_byte"]) == LANGUAGES
    assert first["mean_bits_per_byte"] == pytest.approx(sum(first["bits_per_byte"].values()) / 24)
    assert [row["step"] for row in train] == list(range(1, 13))
    for row in train:
        assert set(row) - {"expert_load"} == TRAIN_KEYS
        assert row["loss"] == step_record(row["step"], total=12).loss  # to the last bit
    assert [row["step"] for row in train if "expert_load" in row] == [1, 5, 10, 12]
    load = train[-1]["expert_load"]
    assert (len(load), len(load[0])) == (4, 16)
    assert sum(load[0]) == pytest.approx(1, abs=1e-4)


def test_optional_figures_appear_where_they_exist(tmp_path: Path) -> None:
    with recorder(tmp_path) as target:
        target.step(step_record(1, muon_lr=2e-3))
        target.step(step_record(2, expert_imbalance=None, expert_load=None, tokens_by_language=None))
    with_muon, dense = rows(tmp_path / "metrics.jsonl")
    assert with_muon["muon_lr"] == 2e-3
    assert not {"muon_lr", "expert_imbalance", "expert_load", "tokens_by_language"} & set(dense)


def test_numbers_that_are_not_finite_become_null_and_are_named(tmp_path: Path) -> None:
    validation = validation_record(1)
    bits = {**validation.bits_per_byte, "mt": math.inf}
    with recorder(tmp_path) as target:
        target.step(step_record(1, loss=math.nan, expert_imbalance_by_layer=(1.0, -math.inf)))
        target.validation(type(validation)(step=1, loss=1.0, bits_per_byte=bits, mean_bits_per_byte=math.inf))
        target.event("nonfinite", value=math.nan)
    train, validation_row = rows(tmp_path / "metrics.jsonl")
    assert train["loss"] is None
    assert train["nonfinite"] == ["loss", "expert_imbalance_by_layer.1"]
    assert validation_row["bits_per_byte"]["mt"] is None
    assert validation_row["nonfinite"] == ["bits_per_byte.mt", "mean_bits_per_byte"]
    assert rows(tmp_path / "events.jsonl")[1]["nonfinite"] == ["value"]


def test_rows_are_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    target = recorder(tmp_path)
    target.step(step_record(1))
    assert steps(tmp_path, "train") == [1]
    target.close()
    target.close()
    assert [row["kind"] for row in rows(tmp_path / "events.jsonl")] == ["opened", "closed"]


def test_resume_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with recorder(tmp_path) as target:
        record(target, first=0, last=9, validate_at=(0, 3, 6, 9))
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "train", "step": 10, "lo')
    with open(tmp_path / "events.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "sav')
    with recorder(tmp_path, resumed_step=6) as target:
        assert target.has_validation(6)
        assert not target.has_validation(9)
        record(target, first=7, last=12, validate_at=(9, 12))
    assert steps(tmp_path, "train") == list(range(1, 13))
    assert steps(tmp_path, "validation") == [0, 3, 6, 9, 12]
    events = rows(tmp_path / "events.jsonl")
    assert [event["kind"] for event in events] == ["opened", "closed", "opened", "rows_dropped", "closed"]
    dropped = {key: events[3][key] for key in ("resumed_step", "train_rows", "validation_rows", "torn_lines")}
    assert dropped == {"resumed_step": 6, "train_rows": 3, "validation_rows": 1, "torn_lines": 1}
    assert not list(tmp_path.glob("*.tmp"))


def test_resume_at_the_last_row_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    with recorder(tmp_path) as target:
        record(target, first=0, last=6, validate_at=(6,))
    metrics = tmp_path / "metrics.jsonl"
    before, inode = metrics.read_bytes(), metrics.stat().st_ino
    recorder(tmp_path, resumed_step=6).close()
    assert (metrics.read_bytes(), metrics.stat().st_ino) == (before, inode)
    assert "rows_dropped" not in [row["kind"] for row in rows(tmp_path / "events.jsonl")]


def test_a_validation_is_written_once(tmp_path: Path) -> None:
    with recorder(tmp_path) as target:
        record(target, first=0, last=3, validate_at=(0, 3))
        target.validation(validation_record(3))
    with recorder(tmp_path, resumed_step=3) as target:
        target.validation(validation_record(3))
    assert steps(tmp_path, "validation") == [0, 3]


def test_a_fresh_start_forgets_a_life_without_checkpoint(tmp_path: Path) -> None:
    with recorder(tmp_path) as target:
        record(target, first=0, last=4, validate_at=(0,))
    with recorder(tmp_path) as target:
        assert not target.has_validation(0)
        record(target, first=0, last=2, validate_at=(0,))
    assert steps(tmp_path, "train") == [1, 2]
    assert steps(tmp_path, "validation") == [0]


def test_other_ranks_write_and_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with recorder(tmp_path / "run", world=World(rank=1, size=2), console=Console()) as target:
        record(target, first=0, last=5, validate_at=(0, 5))
        target.event("saved", step=5)
        target.progress("saving checkpoint …")
        assert not target.has_validation(0)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_a_full_disk_is_one_line_and_leaves_whole_rows(tmp_path: Path) -> None:
    target = recorder(tmp_path)
    target.step(step_record(1))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(TrainingError, match=r"cannot write .*metrics\.jsonl: .*make room") as failure:
            target.step(step_record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(failure.value)
    assert steps(tmp_path, "train") == [1]
    target.step(step_record(2))
    target.close()
    assert steps(tmp_path, "train") == [1, 2]


def test_missing_wandb_is_said_at_once_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for rank in (0, 1):
        with pytest.raises(MissingDependencyError, match=r"amalthea\[wandb\]"):
            recorder(tmp_path / "run", logging=LoggingConfig(wandb=True), world=World(rank=rank, size=2))
    assert not (tmp_path / "run").exists()


def test_trackers_that_are_off_are_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from amalthea.config.run import LoggingConfig\n"
        "from amalthea.core.world import World\n"
        "from amalthea.train.records import Recorder\n"
        f"Recorder({str(tmp_path)!r}, world=World(), logging=LoggingConfig(tensorboard=False), total_steps=1).close()\n"
        "print([name for name in ('torch', 'tensorboard', 'wandb') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging = LoggingConfig(tensorboard=True)
    with recorder(tmp_path, logging=logging) as target:
        record(target, first=0, last=9, validate_at=(0, 6, 9))
    with recorder(tmp_path, logging=logging, resumed_step=6) as target:
        record(target, first=7, last=8)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in read.Scalars("train/loss")] == list(range(1, 9))
    assert [event.step for event in read.Scalars("bits_per_byte/mt")] == [0, 6]
    assert read.Scalars("train/loss")[2].value == pytest.approx(step_record(3, total=12).loss)
