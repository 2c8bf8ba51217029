"""Peers' models have their published sizes; rows, calibration and verdict are computed as they say."""

from __future__ import annotations

import pytest

from amalthea.config.check import resolve
from amalthea.config.overrides import apply_overrides
from amalthea.plan.accounting import account
from amalthea.plan.check_published import (
    BEFORE,
    REFERENCE_GPUS,
    REFERENCE_LAYOUT,
    RETRY_LAYOUT,
    Row,
    _optimizer_rows,
    _verdict,
)
from amalthea.plan.peers import deepseek_v3_model, peers, qwen3_30b_model, qwen3_235b_model
from amalthea.recipes.europa_1t import europa_1t


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [(deepseek_v3_model(), 671.0, 37.6), (qwen3_235b_model(), 235.1, 22.2), (qwen3_30b_model(), 30.5, 3.35)],
)
def test_models_have_their_published_sizes(model, total: float, active: float) -> None:
    counted = account(model, seq_len=4096)
    assert counted.total_params / 1e9 == pytest.approx(total, rel=0.002)
    assert counted.active_params / 1e9 == pytest.approx(active, rel=0.01)


def test_every_layout_is_a_valid_one() -> None:
    for overrides in (REFERENCE_LAYOUT, BEFORE, RETRY_LAYOUT):
        resolve(apply_overrides(europa_1t(), overrides), world_size=REFERENCE_GPUS)
    for peer in peers():
        resolve(peer.config, world_size=peer.num_gpus)
        assert peer.differences
    assert sum(peer.calibrates for peer in peers()) == 1


def test_the_optimizers_two_published_figures_are_near() -> None:
    rows = {row.published: row for row in _optimizer_rows(europa_1t())}
    assert set(rows) == {41.7, 2.2}
    assert all(abs(row.error) < 0.2 for row in rows.values())


def test_the_verdict_sorts_rows_by_their_error() -> None:
    def row(name: str, predicted: float, use: str = "predicted", group: str = "reference") -> Row:
        return Row(group, name, "s", 100.0, predicted, use, "simulation", ())

    explained, beyond, judged = _verdict(
        [row("near", 95.0), row("far", 150.0), row("a", 110.0, "judged", "peers"), row("b", 70.0, "judged", "peers")]
    )
    assert explained.endswith("near")
    assert beyond.endswith("far (+50%)")
    assert "mean error 20%, worst 30%" in judged
