"""`amalthea plan --cluster` from the outside."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from amalthea.cli import main as cli
from amalthea.core.errors import ConfigError
from amalthea.plan import machine

RUN = ("plan", "quickstart", "--cluster", "h100-sxm", "--gpus", "2", "model.num_layers=2")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[str]]:
    code = cli.run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def test_json_keeps_the_counts_and_adds_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = answer(capsys, *RUN, "--json", "--trace", str(tmp_path / "trace.json"), "--tokens", "1e9")
    assert code == 0
    document = json.loads(out)
    assert {"recipe", "seq_len", "model"} < set(document)
    assert {"allocated_gib", "reserved_gib", "stranded_gib", "retries", "host_gib", "fits"} < set(document["memory"])
    assert {"step_s", "bytes_sent"} < set(document["optimizer"])
    keys = {"step_s", "compute_s", "exposed_comm_s", "tokens_per_s_per_gpu", "mfu"}
    assert keys < set(document["timeline"])
    assert document["layout"]["gpus"] == 2
    assert document["budget"]["tokens"] == 10**9
    assert isinstance(document["warnings"], list)
    assert err[0].startswith("tracing rank 0 of 2")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_tables_and_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, out, _ = answer(capsys, *RUN, "--html", str(page))
    assert code == 0
    for heading in ("tokens/s per GPU", "one step (simulation)", "memory of this rank", "ladder of levers", "warnings"):
        assert heading in out
    assert page.stat().st_size > 10_000


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("model.num_layers=1", "data.seq_len=64", "train.global_batch_tokens=512")
    code, out, err = answer(
        capsys, "plan", "quickstart", "--cluster", "this", "--gpus", "1", "device=cpu", *small, "--json"
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["layout"]["cluster"] == "this"
    assert document["timeline"]["step_s"] > 0
    assert document["timeline"]["sensitivities"] == []
    assert re.search(r"timed on this machine, \d+ threads? a rank", document["timeline"]["assumptions"][0])
    assert "timed on this machine" in document["timeline"]["leans_on"]["assumption"]
    assert document["memory"]["fits"]


@pytest.mark.parametrize("more", [(), ("--optimizer",)])
def test_processes_that_measure_have_the_threads_of_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given: list[int | None] = []

    def stopwatch(num_processes: int, *, device: str, threads: int | None) -> None:
        given.append(threads)
        raise ConfigError("seen")

    monkeypatch.setattr(machine, "Stopwatch", stopwatch)
    assert answer(capsys, "plan", "quickstart", "--cluster", "this", "--gpus", "2", "device=cpu", *more)[0] == 2
    assert given == [5]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["plan", "quickstart", "--search"], "error: no machine for --search; add --cluster NAME"),
        (["plan", "quickstart", "--gpus", "2"], "error: no machine for --gpus; add --cluster NAME, or --optimizer"),
        ([*RUN, "--tokens", "many"], "error: --tokens is 'many'; give a number of tokens, such as 1e12"),
        ([*RUN, "--rank", "2"], "error: rank is 2, but the ranks of this run are 0 to 1"),
        (
            [*RUN, "--optimizer", "--check"],
            "error: --check: not with --optimizer, which plans the optimizer step alone; leave one out",
        ),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    code, out, err = answer(capsys, *arguments)
    assert (code, out, err[-1]) == (2, "", line)


def test_a_load_that_is_none_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load = tmp_path / "load.txt"
    load.write_text("1 2 three")
    code, _, err = answer(capsys, *RUN, "--expert-load", str(load))
    assert code == 2
    assert "neither a JSON list of numbers nor a number a line" in err[-1]
