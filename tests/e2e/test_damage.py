"""Full disks and damaged checkpoints: the last good one survives, is found, and the run goes on from it exactly."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.runs import (
    Places,
    WholeRun,
    blow_after,
    checkpoint_steps,
    curve,
    events,
    final_state,
    other_bits,
    run_config,
    run_inside,
    write_recipe,
)

from amalthea.cli.main import run


@pytest.fixture
def recipe(places: Places, tmp_path: Path) -> str:
    return write_recipe(tmp_path / "recipe", run_config(places.corpus))


@contextmanager
def file_size_limit_after(step: int, num_bytes: Callable[[], int]) -> Iterator[None]:
    """From a step on, no file grows beyond `num_bytes()`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with blow_after(step, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes(), hard))):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def checkpoint_bytes(run_dir: Path) -> int:
    return sum(file.stat().st_size for file in (run_dir / "checkpoints" / "step_3").iterdir())


def goes_on_from_step_3(run_dir: Path, places: Places, whole: Path) -> None:
    """With room again, the run ends as if nothing had happened."""
    assert checkpoint_steps(run_dir) == [3]
    assert run_ranks(1, run_inside, run_config(places.corpus), run_dir, places.cache) == [0]
    assert [event["step"] for event in events(run_dir, "resumed")] == [3]
    assert curve(run_dir) == curve(whole)
    assert other_bits(final_state(run_dir), final_state(whole)) == []


def test_a_disk_that_is_full_at_a_save(
    recipe: str,
    small_disk: Callable[[int], Path],
    places: Places,
    whole_run: WholeRun,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = small_disk(int(1.8 * checkpoint_bytes(whole_run(1))))
    assert run(["train", recipe, "--run-dir", str(disk / "run")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    folder = re.escape(str(disk / "run" / "checkpoints"))
    assert re.fullmatch(
        rf"error: cannot save {folder}/step_6: {folder} needs .* and has .* free; make room or keep fewer checkpoints; "
        rf"the last good checkpoint, {folder}/step_3, is untouched",
        said,
    )
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    goes_on_from_step_3(disk / "run", places, whole_run(1))


def test_a_disk_that_fills_during_a_save(
    recipe: str, places: Places, whole_run: WholeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even the event that the run ends can be written then; what is told is what went wrong first."""
    run_dir = tmp_path / "run"
    with file_size_limit_after(6, lambda: 100):
        assert run(["train", recipe, "--run-dir", str(run_dir)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    folder = run_dir / "checkpoints"
    assert said == (
        f"error: cannot save {folder / 'step_6'}: [Errno 27] File too large; the last good checkpoint, "
        f"{folder / 'step_3'}, is untouched"
    )
    goes_on_from_step_3(run_dir, places, whole_run(1))


def test_a_disk_that_fills_while_metrics_are_written(
    recipe: str, places: Places, whole_run: WholeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    metrics = run_dir / "metrics.jsonl"
    with file_size_limit_after(4, lambda: metrics.stat().st_size + 100):
        assert run(["train", recipe, "--run-dir", str(run_dir)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: cannot write {metrics}: ")
    assert said.endswith("make room or give write access, then start the same run folder again: it goes on from its "
                         "newest checkpoint")  # fmt: skip
    assert metrics.read_bytes().endswith(b"}\n"), "the row that did not fit is taken out again"
    goes_on_from_step_3(run_dir, places, whole_run(1))


def truncate(checkpoint: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def flip_a_bit(checkpoint: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_damaged_checkpoints_are_skipped_aloud(
    recipe: str, whole_run: WholeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(whole_run(1), tmp_path / "run"))
    truncate(run_dir / "checkpoints" / "step_8")
    flip_a_bit(run_dir / "checkpoints" / "step_6")
    (run_dir / "checkpoints" / "step_9.tmp").mkdir()
    assert run(["train", recipe, "--run-dir", str(run_dir)]) == 0

    reasons = [
        ("step_9.tmp", r"it was never finished"),
        ("step_8", r"__0_0\.distcp has \d+ bytes instead of \d+"),
        ("step_6", r"__0_0\.distcp is damaged: its checksum is \w{8} instead of \w{8}"),
    ]
    skipped = events(run_dir, "checkpoint_skipped")
    assert len(skipped) == len(reasons)
    said = capsys.readouterr().out.splitlines()
    for event, (name, reason) in zip(skipped, reasons, strict=True):
        assert event["path"] == str(run_dir / "checkpoints" / name)
        assert re.fullmatch(reason, event["reason"])
        assert f"skipped {name}: {event['reason']}" in said
    assert "resumed after step 3" in said
    assert checkpoint_steps(run_dir) == [3, 6, 8]
    assert curve(run_dir) == curve(whole_run(1))
    assert other_bits(final_state(run_dir), final_state(whole_run(1))) == []


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_over(
    recipe: str, whole_run: WholeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(whole_run(1), tmp_path / "run"))
    for step in (3, 6):
        truncate(run_dir / "checkpoints" / f"step_{step}")
    (run_dir / "checkpoints" / "step_8" / "complete.json").unlink()
    assert run(["train", recipe, "--run-dir", str(run_dir)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    size = r"\(__0_0\.distcp has \d+ bytes instead of \d+\)"
    assert re.fullmatch(
        rf"error: {re.escape(str(run_dir))}/checkpoints has no whole checkpoint to go on from: "
        rf"step_8 \(\S+ has no complete\.json: it was never finished\), step_6 {size}, step_3 {size}; "
        r"bring one back, or delete them to train from the beginning, or name another --run-dir",
        said,
    )
    for name in ("metrics.jsonl", "events.jsonl"):
        assert (run_dir / name).read_bytes() == (whole_run(1) / name).read_bytes()
    assert checkpoint_steps(run_dir) == [3, 6, 8]


def test_a_run_killed_in_its_first_save_starts_over(places: Places, whole_run: WholeRun, tmp_path: Path) -> None:
    """Nothing that was whole is lost then."""
    run_dir = Path(shutil.copytree(whole_run(1), tmp_path / "run"))
    for step in (6, 8):
        shutil.rmtree(run_dir / "checkpoints" / f"step_{step}")
    (run_dir / "checkpoints" / "step_3").rename(run_dir / "checkpoints" / "step_3.tmp")
    assert run_ranks(1, run_inside, run_config(places.corpus), run_dir, places.cache) == [0]
    assert [Path(event["path"]).name for event in events(run_dir, "checkpoint_skipped")] == ["step_3.tmp"]
    assert events(run_dir, "resumed") == []
    assert curve(run_dir) == curve(whole_run(1))
    assert checkpoint_steps(run_dir) == [3, 6, 8]
