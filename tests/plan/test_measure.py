"""Measuring this machine: figures that a second way of measuring confirms, and refusals."""

from __future__ import annotations

import time

import pytest
import torch
from support.ranks import run_ranks

from amalthea.core.errors import ConfigError
from amalthea.core.world import World
from amalthea.plan.events import COMPUTE, Collective, Kernel, Trace
from amalthea.plan.measure import Machine, measure_this
from amalthea.plan.timeline import simulate


def measured(world: World, num_processes: int) -> tuple[Machine, float, float]:
    """In a process of its own, since it forks; with two ceilings: the best of as many products and copies in turn."""
    torch.set_num_threads(1)
    found = measure_this(num_processes=num_processes, budget_s=0.6)
    left, right = torch.randn(768, 768), torch.randn(768, 768)
    source, target = torch.ones(32 << 20), torch.empty(32 << 20)
    products, copies = [], []
    for _ in range(5):
        began = time.perf_counter()
        left @ right
        products.append(time.perf_counter() - began)
        began = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - began)
    return found, 2 * 768**3 / min(products), 8 * (32 << 20) / min(copies)


def test_it_measures_what_another_clock_measures() -> None:
    ((found, flops_per_s, bytes_per_s),) = run_ranks(1, measured, 1)
    # A machine that others use is uneven: a factor of three tells a wrong unit or count all the same.
    single = found.cluster.peak_flops_per_s * found.assumptions.fp32_peak
    assert 1 / 3 < single / flops_per_s < 3
    assert 1 / 3 < found.cluster.hbm_bytes_per_s / bytes_per_s < 3
    assert found.cluster.num_gpus == 1
    assert set(found.cluster.unverified) == {"inter_gb_per_s", "intra_gb_per_s", "host_link_gb_per_s"}


def test_processes_gather_and_a_step_can_be_simulated_on_what_was_found() -> None:
    ((found, _, _),) = run_ranks(1, measured, 2)
    cluster = found.cluster
    assert cluster.num_gpus == 2
    assert "intra_gb_per_s" not in cluster.unverified
    assert 1e7 < cluster.intra_bytes_per_s < 1e12
    # What was measured is taken as reached: a second's product and a second's gather take a second each.
    events = (
        Kernel("mm", COMPUTE, cluster.peak_flops_per_s, 0, "bfloat16"),
        Collective("all_gather", "ep", (0, 1), int(cluster.intra_bytes_per_s), "ep", "none", "bfloat16"),
    )
    step = simulate(Trace(0, 2, 1, (), events), cluster, assumptions=found.assumptions)
    assert step.lanes[COMPUTE].busy_s == pytest.approx(1, rel=0.1)
    assert step.lanes["ep"].busy_s == pytest.approx(1, rel=0.1)


def test_no_process_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 processes cannot be measured; give 1 or more"):
        measure_this(num_processes=0)
