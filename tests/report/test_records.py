"""A run folder is read back as written, torn at its end or not; anything else is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.run_records import LANGUAGES, record_run, step_record, validation_record

from amalthea.core.errors import DataError
from amalthea.report.records import read_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return record_run(tmp_path / "run", steps=25, every=10)


def test_rows_come_back(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert run.column("loss").tolist() == [step_record(step, total=25).loss for step in range(1, 26)]
    assert [row["step"] for row in run.validation] == [0, 10, 20, 25]
    assert run.languages == LANGUAGES
    assert run.bits_per_byte("mt")[1] == validation_record(10).bits_per_byte["mt"]
    assert [event["kind"] for event in run.events] == ["opened", "closed"]
    assert run.config["recipe"] == "quickstart"
    assert run.manifest == {"seed": 0}


def test_only_the_newest_expert_load_is_kept(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert [row["step"] for row in run.train if "expert_load" in row] == [25]
    assert run.expert_load is not None
    step, load = run.expert_load
    assert step == 25
    np.testing.assert_allclose(load, step_record(25, total=25).expert_load, atol=1e-6)


def test_null_and_missing_are_nan(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"train","step":1,"loss":null}\n{"kind":"other","step":1}\n')
    run = read_run(tmp_path)
    assert np.isnan(run.column("loss")).tolist() == [True]
    assert np.isnan(run.column("grad_norm")).tolist() == [True]
    assert run.expert_load is None
    assert (run.config, run.manifest, run.events, run.validation) == ({}, {}, (), ())


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_refused(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    whole = metrics.read_text(encoding="utf-8")
    metrics.write_text(whole + '{"kind": "train", "st', encoding="utf-8")
    assert len(read_run(run_dir).train) == 25
    metrics.write_text('{"kind": "train", "st\n' + whole, encoding="utf-8")
    with pytest.raises(DataError, match=r"metrics\.jsonl: line 1 is not a JSON object"):
        read_run(run_dir)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match="is no run folder"):
            read_run(folder)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json is not valid JSON"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"seed": 1}))
    assert read_run(tmp_path).train == ()
