"""Every picture is drawn from whatever records exist, is 1200 pixels wide, and shows its data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from support.run_records import LANGUAGES, record_run

from amalthea.core.errors import DataError
from amalthea.report import plots
from amalthea.report.plots import running_median, write_plots
from amalthea.report.records import read_run

BLUE = np.array([0x00, 0x72, 0xB2])


def ink(path: Path, color: np.ndarray) -> int:
    """Pixels of about this colour."""
    pixels = imread(path)[:, :, :3] * 255
    return int((np.abs(pixels - color).max(axis=2) < 24).sum())


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


@pytest.mark.timeout(120)
def test_pictures_of_a_whole_run(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path / "run", steps=60, every=20)
    paths = write_plots(run_dir)
    assert names(paths) == ["loss.png", "bits_per_byte.png", "throughput.png", "experts.png"]
    for path in paths:
        assert path.parent == run_dir / "plots"
        assert imread(path).shape[1] == 1200
        assert ink(path, BLUE) > 1500, f"{path.name} shows no curve"
    assert sorted(path.name for path in (run_dir / "plots").iterdir()) == sorted(names(paths))


def test_pictures_of_one_step_without_validation_or_experts(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path, steps=1, every=None)
    assert names(write_plots(run_dir)) == ["loss.png", "throughput.png", "experts.png"]
    assert ink(run_dir / "plots" / "loss.png", BLUE) > 100, "a single step needs a dot"
    row = json.loads((run_dir / "metrics.jsonl").read_text())
    for name in ("expert_imbalance", "expert_imbalance_by_layer", "expert_load", "data_s"):
        del row[name]
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert names(write_plots(run_dir)) == ["loss.png", "throughput.png"]


def test_a_run_with_a_validation_only(tmp_path: Path) -> None:
    row = {"kind": "validation", "step": 0, "loss": 9.0, "bits_per_byte": {"mt": 4.0}, "mean_bits_per_byte": 4.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert names(write_plots(tmp_path)) == ["bits_per_byte.png"]


def test_nothing_recorded_draws_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert write_plots(tmp_path) == []
    with pytest.raises(DataError):
        write_plots(tmp_path / "missing")


def test_nulls_leave_gaps(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path, steps=12, every=6)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] == "validation":
            row["bits_per_byte"] |= {"mt": None}
            row |= {"mean_bits_per_byte": None, "loss": None} if row["step"] == 6 else {}
        elif row["step"] % 2:
            row |= {"loss": None, "grad_norm": None, "expert_imbalance": None, "expert_imbalance_by_layer": [None] * 4}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(write_plots(run_dir)) == 4
    left, _ = plots.draw_bits_per_byte(read_run(run_dir)).axes
    assert "mt" not in [label.get_text() for label in left.get_yticklabels()]


def test_languages_are_ranked_by_their_last_value(tmp_path: Path) -> None:
    run = read_run(record_run(tmp_path, steps=40, every=20))
    left, right = plots.draw_bits_per_byte(run).axes
    shown = [label.get_text() for label in left.get_yticklabels()]
    assert sorted(shown) == LANGUAGES
    last = [run.bits_per_byte(code)[-1] for code in shown]
    assert last == sorted(last, reverse=True)
    assert len(right.lines) == 25


def test_heat_map_counts_layers_from_the_dense_ones(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path, steps=5, layers=3, experts=8)
    (run_dir / "config.json").write_text(json.dumps({"model": {"num_dense_layers": 2}}))
    figure = plots.draw_experts(read_run(run_dir))
    (image,) = figure.axes[1].images
    assert image.get_array() is not None
    assert np.asarray(image.get_array()).shape == (3, 8)
    assert list(image.get_extent()) == [-0.5, 7.5, 4.5, 1.5]
    assert np.asarray(image.get_array()).mean() == pytest.approx(1, abs=1e-3)


def test_a_failed_drawing_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = record_run(tmp_path, steps=2, every=None)
    write_plots(run_dir)
    before = (run_dir / "plots" / "loss.png").read_bytes()

    def torn(self: Figure, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", torn)
    with pytest.raises(OSError, match="No space"):
        write_plots(run_dir)
    assert (run_dir / "plots" / "loss.png").read_bytes() == before
    assert len(list((run_dir / "plots").iterdir())) == 3


def test_running_median_ignores_a_spike_and_keeps_the_first_value() -> None:
    values = np.linspace(9, 5, 300)
    values[150] = 100
    values[200] = math.nan
    smoothed = running_median(values, at=np.arange(300))
    assert smoothed[0] == 9
    assert smoothed.max() == 9
    assert np.isfinite(smoothed).all()
    np.testing.assert_allclose(smoothed[10:140], values[10:140], atol=1e-9)
