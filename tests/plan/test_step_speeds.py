"""Kernel times against arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from support.timelines import ROUND, exact

from amalthea.plan.clusters import get_cluster
from amalthea.plan.events import Kernel, Phase
from amalthea.plan.optimizer_time import Speeds
from amalthea.plan.step_speeds import (
    DTYPES,
    KERNEL_CLASSES,
    Assumptions,
    KernelTable,
    StepSpeeds,
    dtype_number,
    kernel_class,
)


def seconds(speeds: StepSpeeds, flops: float, num_bytes: float, *, kind: str = "matmul", dtype: str = "bf16") -> float:
    table = KernelTable(
        np.array([flops]),
        np.array([num_bytes]),
        np.array([KERNEL_CLASSES.index(kind)]),
        np.array([DTYPES.index(dtype)]),
    )
    return float(speeds.kernel_seconds(table)[0])


def test_a_kernel_takes_the_longer_of_computing_and_moving() -> None:
    speeds = StepSpeeds(ROUND, exact(matmul=0.5, hbm=0.8, fp32_peak=0.1))
    assert seconds(speeds, 50e12, 0) == pytest.approx(1.0)
    assert seconds(speeds, 50e12, 1.6e12) == pytest.approx(2.0)
    assert seconds(speeds, 50e12, 0, dtype="fp32") == pytest.approx(10.0)
    assert seconds(speeds, 50e12, 0, dtype="fp8") == pytest.approx(0.5)
    assert seconds(speeds, 0, 0.8e12, kind="memory") == pytest.approx(1.0)


def test_small_products_are_slower_and_no_kernel_beats_the_floor() -> None:
    speeds = StepSpeeds(ROUND, exact(matmul_half_flops=1e9, kernel_floor_s=1e-5))
    assert seconds(speeds, 1e9, 0) / 1e9 == pytest.approx(2 * seconds(speeds, 1e15, 0) / 1e15, rel=1e-5)
    assert seconds(speeds, 1e6, 8) == pytest.approx((1e9 + 1e6) / 100e12)
    assert seconds(speeds, 0, 8, kind="memory") == 1e-5
    # Only products of one matrix with another ramp up.
    assert seconds(speeds, 1e9, 0, kind="grouped") == pytest.approx(1e-5)


def test_the_defaults_meet_what_was_measured_on_one_gpu() -> None:
    """One H200 multiplies 8192³ at 770 to 800 TFLOP/s and copies at 4.3 TB/s."""
    speeds = StepSpeeds(get_cluster("h200-sxm"))
    flops = 2 * 8192**3
    assert 770e12 < flops / seconds(speeds, flops, 3 * 2 * 8192**2) < 800e12
    assert 4.25e12 < 1e10 / seconds(speeds, 0, 1e10, kind="memory") < 4.35e12


def test_the_optimizer_is_priced_as_in_its_own_estimate() -> None:
    cluster = get_cluster("jupiter")
    assert seconds(StepSpeeds(cluster), 1e14, 0, kind="newton_schulz") == pytest.approx(
        1e14 / Speeds(cluster).flops_per_s
    )


@pytest.mark.parametrize(
    ("name", "flops", "phase", "kind"),
    [
        ("mm", 1.0, Phase("forward", "blocks.0"), "matmul"),
        ("baddbmm", 1.0, Phase("optimizer", "newton_schulz"), "newton_schulz"),
        ("_grouped_mm", 1.0, None, "grouped"),
        ("_varlen_attn_backward", 1.0, None, "attention"),
        ("_scaled_dot_product_flash_attention_for_cpu", 1.0, None, "attention"),
        ("mm", 0.0, Phase("forward"), "memory"),
        ("add", 0.0, Phase("optimizer"), "memory"),
    ],
)
def test_kernels_are_told_apart_by_name_and_place(name: str, flops: float, phase: Phase | None, kind: str) -> None:
    assert KERNEL_CLASSES[kernel_class(Kernel(name, "compute", flops, 1, "bfloat16"), phase)] == kind


def test_dtypes_are_known_by_both_names() -> None:
    names = {"bfloat16": "bf16", "bf16": "bf16", "float16": "bf16", "float8_e4m3fn": "fp8", "float32": "fp32"}
    assert {name: DTYPES[dtype_number(name)] for name in names} == names
    assert DTYPES[dtype_number("float64")] == "fp32"


def test_links_from_pair_to_pair_give_a_pair_no_more() -> None:
    """A GH200 has 150 GB/s to each of three neighbours."""
    speeds = StepSpeeds(get_cluster("jupiter"), exact())
    rates = [speeds.node_bytes_per_s(num_ranks=n) for n in (2, 3, 4)]
    assert rates == [150e9, 300e9, 450e9]
    assert StepSpeeds(ROUND, exact()).node_bytes_per_s(num_ranks=2) == 100e9


def test_every_assumption_names_its_value_and_reason() -> None:
    lines = Assumptions(hbm=0.5).lines()
    assert "hbm = 0.5 (of HBM bandwidth: one H200 copies at 4.3 of 4.8 TB/s)" in lines
    assert len({line.split(" = ")[0] for line in lines}) == len(lines)


def test_a_host_link_that_the_cluster_names_is_used() -> None:
    known, unknown = StepSpeeds(ROUND, exact(host_link=0.5)), StepSpeeds(get_cluster("leonardo"), exact())
    assert known.host_link_bytes_per_s == 10e9
    assert unknown.host_link_bytes_per_s == 20e9
