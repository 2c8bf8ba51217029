"""The picture of the load per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.patches import StepPatch
from support.tiny import tiny_config

from amalthea.core.errors import ConfigError
from amalthea.plan.optimizer_step import OptimizerPlan, plan_optimizer_step
from amalthea.report.optimizer_load import draw_load, write_load_picture


def plan(num_gpus: int, **overrides: Any) -> OptimizerPlan:
    config = tiny_config(**{"optim__experts": "muon", "optim__matrices": "muon", **overrides})
    return plan_optimizer_step(config, num_gpus=num_gpus)


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "panels"),
    [(1, {}, 1), (4, {}, 2), (16, {}, 2), (8, {"parallel__dp_replicate": 2}, 3), (2, {"optim__matrices": "adamw"}, 1)],
)
def test_a_picture_is_1200_pixels_wide(tmp_path: Path, num_gpus: int, overrides: dict[str, Any], panels: int) -> None:
    made = plan(num_gpus, **overrides)
    write_load_picture(made, tmp_path / "load.png", title="tiny", flops_per_s=7e14)
    assert imread(tmp_path / "load.png").shape[1] == 1200
    assert [path.name for path in tmp_path.iterdir()] == ["load.png"]
    axes = [a for a in draw_load(made, title="tiny", flops_per_s=7e14).axes if a.get_ylabel()]
    assert len(axes) == panels


def test_bars_are_the_loads_busiest_first() -> None:
    made = plan(4)
    top = draw_load(made, title="tiny", flops_per_s=7e14).axes[0]
    experts, dense = (patch.get_data() for patch in top.patches if isinstance(patch, StepPatch))
    assert top.get_ylabel() == "Newton-Schulz (MFLOP)"
    np.testing.assert_allclose(dense.values * 1e6, np.sort(made.ledger.flops.ravel())[::-1])
    np.testing.assert_allclose(np.sort(experts.values) * 1e6, np.sort(made.ledger.expert_flops.ravel()))
    levels = [line.get_ydata()[0] for line in top.lines]
    assert levels == pytest.approx([made.ledger.flops.mean() / 1e6])


def test_a_folder_that_is_not_there_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_load_picture(plan(1), tmp_path / "none" / "load.png", title="tiny", flops_per_s=7e14)
