"""What code of one's own does that a trace cannot write down is one clear error, not a traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.tiny import tiny_config
from torch.distributed._functional_collectives import all_gather_tensor

from amalthea.core.errors import ConfigError
from amalthea.plan.trace import trace_step
from amalthea.train.build import build
from amalthea.train.step import train_step


def _masked() -> None:
    x = torch.ones(4)
    x[x > 0]


def _gathered() -> None:
    dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4))


def _functional() -> None:
    # Its fake kernel would pass for a local one.
    all_gather_tensor(torch.ones(4), 0, dist.group.WORLD)


def _without_fake_kernel() -> None:
    if not hasattr(torch.ops.of_a_user, "twice"):
        torch.library.define("of_a_user::twice", "(Tensor x) -> Tensor")
        torch.library.impl("of_a_user::twice", "cpu")(lambda x: 2 * x)
    torch.ops.of_a_user.twice(torch.ones(4))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            _gathered,
            r"the step calls c10d::allgather_, a collective that .* has no rule for; .* all_gather_into_tensor",
        ),
        (_functional, r"the step calls _c10d_functional::all_gather_into_tensor, a collective"),
        (dist.barrier, r"the step calls c10d::barrier, a collective"),
        (_masked, r"aten\.index\.Tensor, whose result is as large as values say.* torch\.where"),
        (_without_fake_kernel, r"of_a_user\.twice\.default, which has no fake kernel .*register_fake"),
        (lambda: F.grouped_mm(torch.ones(8, 8), torch.ones(8, 8)), r"grouped_mm with two matrices and no offs"),
    ],
)
def test_what_code_of_ones_own_cannot_be_traced_is_one_clear_error(own: Callable[[], object], message: str) -> None:
    def step(run: Any, batches: Any, **options: Any) -> None:
        own()
        train_step(run, batches, **options)

    with pytest.raises(ConfigError, match=message):
        trace_step(tiny_config(), rank=0, world_size=2, build=build, train_step=step)
