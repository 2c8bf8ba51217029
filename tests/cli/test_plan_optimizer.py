"""`amalthea plan --optimizer` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from amalthea.cli import main as cli

CUT = ("plan", "quickstart", "model.moe.num_experts=8", "--optimizer", "--gpus", "16")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, standard output, and the lines of standard error."""
    code = cli.run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def test_json_has_everything_under_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer(capsys, "plan", "europa-1t", "--optimizer", "--json")
    assert (code, err) == (0, [])
    document = json.loads(out)
    optimizer = document["optimizer"]
    assert document["model"]["total_params"] == 951_874_634_240
    assert set(optimizer) == {
        "gpus",
        "grid",
        "replicas",
        "experts_storage",
        "storage",
        "units",
        "units_by_kind",
        "units_local",
        "units_routed",
        "owners",
        "imbalance",
        "flops",
        "busiest_rank",
        "bytes_sent",
        "bytes_sent_mean",
        "bytes_sent_by_part",
        "collectives",
        "collectives_by_kind",
        "scratch_bytes",
        "scratch_bytes_by_part",
        "momentum_bytes",
        "momentum_bytes_mean",
        "groups",
        "adamw",
        "cluster",
        "figures_are",
        "step_s",
        "step_parts",
        "hidden_s",
        "without_replicas_s",
        "backward_all_reduce_s",
        "assumptions",
        "published",
    }
    assert optimizer["figures_are"] == "estimate"
    assert optimizer["cluster"] == "jupiter"
    assert [set(figure) for figure in optimizer["published"]] == 2 * [
        {"name", "published_s", "estimated_s", "ratio", "parts", "assumptions", "readings"}
    ]
    assert sum(part["seconds"] for part in optimizer["step_parts"]) - optimizer["hidden_s"] == optimizer["step_s"]


def test_tables_say_who_falls_to_adamw_what_is_routed_and_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, *CUT)
    words = " ".join(out.split())
    assert code == 0
    assert "AdamW, a matrix (embedding or head) embed 8192×192" in words
    assert "more ranks than experts, so experts are cut by rows: routed path" in words
    assert "what the estimate assumes" in words
    assert "step on jupiter (estimate)" in words


def test_ep_is_short_for_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    _, short, _ = answer(capsys, "plan", "quickstart", "--optimizer", "--gpus", "4", "--ep", "2", "--json")
    _, long, _ = answer(capsys, "plan", "quickstart", "parallel.ep=2", "--optimizer", "--gpus", "4", "--json")
    assert short == long
    assert json.loads(short)["optimizer"]["grid"]["efsdp"] == 2


def test_the_picture_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = answer(capsys, *CUT, "--json", "--picture", str(tmp_path / "load.png"))
    assert code == 0
    assert json.loads(out)["optimizer"]["picture"] == str(tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            [*CUT, "--cluster", "jupitre"],
            "error: unknown cluster 'jupitre'; did you mean jupiter? clusters are jupiter, alps, isambard-ai, "
            "marenostrum5-acc, leonardo, lumi-g, h100-sxm, h200-sxm, b200, and this",
        ),
        (
            ["plan", "quickstart", "--picture", "load.png"],
            "error: --picture only means something with --optimizer; add it",
        ),
        (
            [*CUT, "parallel.dp_replicate=3"],
            "error: parallel.dp_replicate is 3, which does not divide the 16 ranks of this run; valid: 1, 2, 4, 8, 16",
        ),
        (
            [*CUT, "--picture", "/nowhere/load.png"],
            "error: --picture /nowhere/load.png cannot be written: No such file or directory; name a file elsewhere",
        ),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    code, out, err = answer(capsys, *arguments)
    assert (code, out, err) == (2, "", [line])
