"""The benchmark of a training step runs, finds both sides at the same work, and writes its figures."""

from __future__ import annotations

from pathlib import Path

from support.programs import run_benchmark


def test_a_tiny_size(tmp_path: Path) -> None:
    options = ("--sizes", "tiny", "--documents", "packed", "--rounds", "1", "--threads", "1")
    result, out, err = run_benchmark("train_step", *options, figures=tmp_path / "figures.json", timeout_s=120)
    (row,) = result["rows"]
    assert row["size"] == "tiny"
    assert row["documents"] == "packed"
    assert row["agreement"]["first_loss_difference"] < 1e-5
    assert row["agreement"]["first_grad_norm_difference"] < 1e-4
    assert row["agreement"]["later_loss_difference"] < 1e-4
    assert row["agreement"]["ours_later_loss"] != row["agreement"]["ours_first_loss"], "the weights were updated"
    for peer in ("default", "same_allocator"):
        for figure in ("ours_tokens_per_s", "peer_tokens_per_s", "ratio", "cpu_time_ratio"):
            spread = row[peer][figure]
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    tried = {(entry["experts"], entry["attention"]) for entry in row["peer_candidates"]}
    assert len(tried) == 6
    assert (row["peer"]["experts"], row["peer"]["attention"]) in tried
    assert result["machine"]["threads"] == 1
    assert "| tiny | packed |" in out
    assert "round 1 of 1" in err
