"""The share of one rank is the reference model's, and the benchmark steps it."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from support.programs import load_benchmark


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_benchmark("optimizer_gpu")


def test_the_busiest_rank_has_one_expert_of_each_layer_and_a_dense_matrix(benchmark: ModuleType) -> None:
    share = benchmark.busiest_share()
    assert share.experts == {(1792, 6144): 148, (6144, 1792): 74}
    # The largest unit, attention's square projections: nobody has less to do who has one.
    assert share.dense == {(6144, 6144): 1}
    assert share.flops == pytest.approx(107e12, rel=0.01)


@pytest.mark.parametrize("form", ["standard", "gram"])
def test_a_small_share_is_stepped(benchmark: ModuleType, form: str) -> None:
    share = benchmark.Share({(1792, 6144): 2, (6144, 1792): 1}, {(6144, 6144): 1}).scaled(64)
    assert share.experts == {(28, 96): 2, (96, 28): 1}
    assert share.dense == {(96, 96): 1}
    row = benchmark.measure(share, form=form, device=torch.device("cpu"), rounds=2)
    assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
    assert row["standard_tflops"] == pytest.approx(share.flops / row["median_s"] / 1e12)
    assert row["peak_bytes"] > 12 * share.elements, "weights, gradients and momenta"
