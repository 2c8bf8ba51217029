"""The command itself, as processes: killed, interrupted and told to leave, alone and under torchrun."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.runs import (
    BLOW_AFTER,
    SAVE_EVERY,
    STEPS,
    Blow,
    Places,
    WholeRun,
    amalthea,
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


def test_killed_then_interrupted_then_finished_is_the_uninterrupted_run(
    places: Places, whole_run: WholeRun, tmp_path: Path
) -> None:
    config, run_dir = run_config(places.corpus), tmp_path / "run"
    hit = write_recipe(tmp_path, config).replace(":plain", ":hit")

    killed = amalthea("train", hit, "--run-dir", run_dir, cache=places.cache, blow=f"SIGKILL {BLOW_AFTER} 0")
    assert killed.returncode == -signal.SIGKILL
    assert list(rows(run_dir, "train")) == list(range(1, BLOW_AFTER + 1))
    assert checkpoint_steps(run_dir) == [SAVE_EVERY]
    with (run_dir / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"kind": "train", "st')  # as a kill in the middle of a write leaves it

    # Ctrl-C after step 6 lets step 7 end and saves it.
    interrupted = amalthea("train", hit, "--run-dir", run_dir, cache=places.cache, blow="SIGINT 6 0")
    assert (interrupted.returncode, interrupted.stderr) == (130, "")
    assert f"resumed after step {SAVE_EVERY}" in interrupted.stdout
    assert f"the same command with --run-dir {run_dir}" in interrupted.stdout
    assert checkpoint_steps(run_dir) == [3, 6, 7]
    stopped = events(run_dir, "stopped")
    assert [(event["step"], event["reason"]) for event in stopped] == [(7, "interrupt")]
    (dropped,) = events(run_dir, "rows_dropped")
    assert (dropped["train_rows"], dropped["validation_rows"], dropped["torn_lines"]) == (2, 1, 1)

    assert run_ranks(1, run_inside, config, run_dir, places.cache) == [0]
    assert [event["step"] for event in events(run_dir, "resumed")] == [SAVE_EVERY, 7]
    assert curve(run_dir) == curve(whole_run(1))
    assert other_bits(final_state(run_dir), final_state(whole_run(1))) == []


@pytest.mark.case(8)
def test_torchrun_with_a_signal_to_one_rank_saves_the_same_step_everywhere(
    places: Places, whole_run: WholeRun, tmp_path: Path
) -> None:
    config, run_dir = run_config(places.corpus), tmp_path / "run"
    hit = write_recipe(tmp_path, config).replace(":plain", ":hit")

    told = amalthea("train", hit, "--run-dir", run_dir, cache=places.cache, ranks=2, blow="SIGTERM 4 1")
    assert "exitcode  : 75" in told.stderr, "torchrun tells the ranks' exit code and has one of its own"
    assert "error:" not in told.stdout + told.stderr
    assert checkpoint_steps(run_dir) == [3, 5]
    assert [(event["step"], event["reason"]) for event in events(run_dir, "stopped")] == [(5, "requeue")]

    assert run_ranks(2, run_inside, config, run_dir, places.cache) == [0] * 2
    assert curve(run_dir) == curve(whole_run(2))
    assert other_bits(final_state(run_dir), final_state(whole_run(2))) == []


@pytest.mark.case(8)
@pytest.mark.parametrize(("ranks", "told"), [(1, 0), (2, 1)])
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_every_rank_leaves_with_the_code_of_the_signal(
    ranks: int, told: int, sent: signal.Signals, code: int, places: Places, tmp_path: Path
) -> None:
    config = run_config(places.corpus, train__validate_every_steps=None, checkpoint__every_steps=None)
    blow = Blow(sent, rank=told, step=1)
    assert run_ranks(ranks, run_inside, config, tmp_path, places.cache, blow) == [code] * ranks
    assert checkpoint_steps(tmp_path) == [2]


def test_a_signal_in_the_last_step_lets_the_run_finish(places: Places, whole_run: WholeRun, tmp_path: Path) -> None:
    blow = Blow(signal.SIGTERM, step=STEPS - 1)
    assert run_ranks(1, run_inside, run_config(places.corpus), tmp_path, places.cache, blow) == [0]
    assert len(events(tmp_path, "finished")) == 1
    assert curve(tmp_path) == curve(whole_run(1))
