"""The summary's figures are those of the records, and what it prints can be copied."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.run_records import record_run, step_record, validation_record

from amalthea.report.summary import render, summarize


def write_rows(folder: Path, name: str, *rows: dict) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def printed(folder: Path, *, width: int = 60) -> str:
    file = io.StringIO()
    render(summarize(folder), Console(file=file, width=width, _environ={}))
    return file.getvalue()


def test_figures_are_those_of_the_records(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path / "run", steps=30, every=10)
    for name in ("step_20", "step_30", "step_40.tmp", "step_100.partial"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)
    summary = summarize(run_dir)
    bits = validation_record(30).bits_per_byte
    worst = max(bits, key=lambda code: bits[code])
    assert (summary.steps, summary.total_steps, summary.tokens, summary.starts) == (30, 30, 30 * 8192, 1)
    assert summary.first_loss == step_record(1, total=30).loss
    assert summary.last_loss == step_record(30, total=30).loss
    assert summary.first_bits_per_byte == validation_record(0).mean_bits_per_byte
    assert summary.last_bits_per_byte == validation_record(30).mean_bits_per_byte
    assert summary.worst_language == (worst, bits[worst])
    assert summary.best_language is not None
    assert summary.best_language[1] == min(bits.values())
    assert summary.training_s == pytest.approx(sum(step_record(s, total=30).step_s for s in range(1, 31)))
    assert summary.peak_allocated_bytes == 1_400_000_000
    assert summary.checkpoint == str(run_dir / "checkpoints" / "step_30")
    assert json.loads(summary.to_json())["tokens"] == 30 * 8192


def test_wall_time_leaves_out_the_time_between_starts(tmp_path: Path) -> None:
    def at(minute: int, **row: object) -> dict:
        return {"time": f"2026-03-01T12:{minute:02d}:00.000+00:00"} | row

    write_rows(
        tmp_path,
        "events.jsonl",
        at(0, kind="opened"),
        at(4, kind="saved"),  # then killed
        at(30, kind="opened"),
        at(37, kind="closed"),
    )
    write_rows(tmp_path, "metrics.jsonl", at(2, kind="train", step=1), at(36, kind="train", step=2))
    summary = summarize(tmp_path)
    assert (summary.starts, summary.wall_s) == (2, 11 * 60)
    assert "11 min 00 s" in printed(tmp_path)
    assert "2 starts" in printed(tmp_path)


def test_commands_and_paths_can_be_copied(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path / ("a long folder name " * 4).strip(), steps=2)
    (run_dir / "checkpoints" / "step_2").mkdir(parents=True)
    (run_dir / "tensorboard").mkdir()
    lines = printed(run_dir).splitlines()
    assert any(line.endswith(f"""amalthea generate '{run_dir}' --prompt "Europe is\"""") for line in lines)
    assert any(line.endswith(f"tensorboard --logdir '{run_dir}/tensorboard'") for line in lines)
    assert any(line.endswith(f"{run_dir}/checkpoints/step_2") for line in lines)
    assert "run finished" in lines[0]


def test_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"train": {"steps": 10}}))
    summary = summarize(tmp_path)
    assert (summary.steps, summary.total_steps, summary.first_loss, summary.checkpoint) == (0, 10, None, None)
    assert summary.next_commands == ()
    assert "run not finished" in printed(tmp_path)
    write_rows(tmp_path, "metrics.jsonl", {"kind": "train", "step": 1, "loss": None, "tokens": 5})
    assert summarize(tmp_path).last_loss is None
    json.loads(summarize(tmp_path).to_json())
