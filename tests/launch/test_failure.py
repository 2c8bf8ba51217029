"""When one rank fails, one rank speaks and all leave."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from amalthea.core.errors import CheckpointError, TrainingError
from amalthea.core.world import World
from amalthea.launch.failure import explain_failure, on_main_rank, run_together

PROGRAM = Path(__file__).parents[1] / "support" / "failing_ranks.py"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[dict[str, Any]]]:
    """By way to fail, what each of two real ranks said and its exit code."""
    answer = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(answer.stdout)


def codes(ranks: list[dict[str, Any]]) -> list[int]:
    return [rank["code"] for rank in ranks]


def said(ranks: list[dict[str, Any]]) -> list[str]:
    return [rank["said"] for rank in ranks if rank["said"]]


def test_the_failing_rank_speaks_and_the_other_leaves_with_its_code(outcomes: dict[str, Any]) -> None:
    ranks = outcomes["one_rank_fails"]
    assert codes(ranks) == [2, 2]
    assert said(ranks) == ["error: broken in one place; and in another\n"]
    assert not ranks[0]["said"]


def test_what_all_ranks_meet_is_said_once(outcomes: dict[str, Any]) -> None:
    ranks = outcomes["all_ranks_fail_alike"]
    assert codes(ranks) == [1, 1]
    assert said(ranks) == ["error: the loss is not finite\n"]


def test_a_failure_of_what_rank_0_does_alone_reaches_all(outcomes: dict[str, Any]) -> None:
    ranks = outcomes["main_rank_fails_alone"]
    assert codes(ranks) == [2, 2]
    assert ranks[0]["said"] == "error: the corpus is empty\n"
    assert not ranks[1]["said"]


def test_a_rank_that_is_killed_is_missed_on_one_line(outcomes: dict[str, Any]) -> None:
    survivor, killed = outcomes["a_rank_is_killed"]
    assert (survivor["code"], killed["code"]) == (1, -9)
    assert survivor["said"].startswith("error: rank 0 lost the other ranks (")
    assert survivor["said"].count("\n") == 1
    assert ".cc:" not in survivor["said"]


def test_a_full_disk_is_one_line(outcomes: dict[str, Any]) -> None:
    ranks = outcomes["the_disk_is_full"]
    assert codes(ranks) == [2, 2]
    (line,) = said(ranks)
    assert line.startswith("error: cannot write runs: No space left on device; mend that or name another --run-dir.")


def test_a_fault_of_ours_keeps_its_traceback_on_one_rank(outcomes: dict[str, Any]) -> None:
    ranks = outcomes["a_fault_of_ours"]
    assert codes(ranks) == [1, 1]
    (text,) = said(ranks)
    assert text.startswith("Traceback")
    assert text.endswith("ZeroDivisionError: ours\n")


def test_what_rank_0_made_reaches_all(outcomes: dict[str, Any]) -> None:
    assert codes(outcomes["nothing_fails"]) == [0, 0]
    assert said(outcomes["nothing_fails"]) == []


def test_alone_errors_pass_through() -> None:
    def fail() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_together(fail, world=World(), store=dist.HashStore())
    with pytest.raises(ZeroDivisionError):
        on_main_rank(fail, world=World())
    assert run_together(lambda: 75, world=World(), store=dist.HashStore()) == 75


@pytest.mark.parametrize(
    ("error", "is_users"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/a/config.json"), True),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/runs/a"), True),
        (FileExistsError(errno.EEXIST, "File exists", "/runs"), True),
        (FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere/x"), False),
        (OSError("of our own making"), False),
        (ValueError("x"), False),
    ],
)
def test_which_errors_of_the_disk_are_the_user_s(error: Exception, is_users: bool) -> None:
    explained = explain_failure(error, world=World(), run_dir=Path("/runs/a"))
    assert isinstance(explained, CheckpointError) == is_users
    assert (explained is error) != is_users


def test_a_lost_connection_is_no_fault_of_this_rank() -> None:
    error = RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.0.1]:2. This is typically")
    explained = explain_failure(error, world=World(rank=3, size=4), run_dir=None)
    assert isinstance(explained, TrainingError)
    assert "rank 3 lost the other ranks (Connection closed by peer [10.0.0.1]:2)" in str(explained)
