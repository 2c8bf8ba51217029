"""Estimates against arithmetic by hand, against what is published, and their documentation."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from support.tiny import tiny_config

from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.plan.clusters import get_cluster
from amalthea.plan.optimizer_published import Published, Reading, published_estimates
from amalthea.plan.optimizer_step import OptimizerPlan, plan_optimizer_step
from amalthea.plan.optimizer_time import StepEstimate, estimate_step
from amalthea.recipes.europa_1t import europa_1t

DOCUMENT = Path(__file__).parents[2] / "docs" / "concepts" / "optimizer.md"
REFERENCE = europa_1t()
EXPERT = 5 * (4 * 1792**2 * 6144 + 2 * 1792**3)
"""FLOP of one expert's matrix."""
JUPITER_FLOPS, JUPITER_NETWORK = 0.71 * 989e12, 0.9 * 25e9


def reference(replicas: str) -> RunConfig:
    return REFERENCE.model_copy(update={"optim": REFERENCE.optim.model_copy(update={"replicas": replicas})})


@cache
def plan(replicas: str) -> OptimizerPlan:
    return plan_optimizer_step(reference(replicas), num_gpus=1536)


def estimate(*, cluster: str = "jupiter", replicas: str = "owning") -> StepEstimate:
    return estimate_step(plan(replicas), reference(replicas), get_cluster(cluster))


def parts(of: StepEstimate | Published) -> dict[str, float]:
    return {part.name: part.seconds for part in of.parts}


def test_a_replica_alone_takes_what_arithmetic_says() -> None:
    """Each of 384 ranks has 222 matrices of experts; a dense owner one of 6144×6144."""
    found = estimate(replicas="repeated")
    assert parts(found)["experts_newton_schulz"] == pytest.approx(222 * EXPERT / JUPITER_FLOPS)
    assert parts(found)["dense_newton_schulz"] == pytest.approx(5 * 6 * 6144**3 / JUPITER_FLOPS)
    # That owner assembles 75.5 MB, less the one piece in 384 that it has.
    one_way = 6144 * 6144 * 2 * (383 / 384) / JUPITER_NETWORK
    assert parts(found)["all_to_all_to_owners"] == pytest.approx(one_way)
    assert found.hidden_s == pytest.approx(one_way)
    assert found.step_s == pytest.approx(sum(parts(found).values()) - one_way)
    assert 0.15 < found.step_s < 0.25
    # Ring all-reduce of fp32 gradients over four replicas: three quarters of the buffer, twice.
    elements = sum(p.params for p in plan("owning").groups) / 384
    assert found.backward_all_reduce_s == pytest.approx(2 * 0.75 * 4 * elements / JUPITER_NETWORK, rel=1e-3)


def test_owning_replicas_divide_the_work_and_pay_for_the_exchange() -> None:
    owning, repeated = estimate(), estimate(replicas="repeated")
    work = [sum(parts(e)[f"{kind}_newton_schulz"] for kind in ("experts", "dense")) for e in (owning, repeated)]
    assert work[1] / work[0] == pytest.approx(4, rel=0.05)
    assert owning.backward_all_reduce_s == 0
    exchange = parts(owning)["replica_reduce"] + parts(owning)["replica_spread"]
    assert owning.without_replicas_s == pytest.approx(owning.step_s - exchange)
    # fp32 there and bf16 back, three quarters of it to others: the least that can be sent.
    least = 0.75 * (4 + 2) * plan("owning").ledger.stored.max() / JUPITER_NETWORK
    assert least <= exchange <= 1.4 * least


def test_a_faster_network_only_shortens_what_it_carries() -> None:
    slow, fast = estimate(), estimate(cluster="h100-sxm")
    for name in ("all_to_all_back", "replica_reduce", "replica_spread"):
        assert parts(slow)[name] == pytest.approx(2 * parts(fast)[name])
    assert parts(slow)["experts_newton_schulz"] == parts(fast)["experts_newton_schulz"]


def test_ranks_of_one_node_use_its_own_links() -> None:
    config = tiny_config(optim__experts="muon", optim__matrices="muon")
    times = {}
    for num_gpus in (4, 8):
        small = plan_optimizer_step(config, num_gpus=num_gpus)
        found, ledger = estimate_step(small, config, get_cluster("jupiter")), small.ledger
        num_bytes = 2 * max(ledger.dense_out.max(), ledger.dense_in.max())
        times[num_gpus] = num_bytes / parts(found)["all_to_all_back"]
    assert times[4] == pytest.approx(0.8 * 450e9)
    assert times[8] == pytest.approx(0.9 * 25e9)


def test_a_cluster_that_is_too_small_is_refused() -> None:
    leonardo = get_cluster("leonardo")
    leonardo.check_holds(13_824)
    with pytest.raises(ConfigError, match=r"leonardo has 13,824 GPUs, fewer than 13,825; take fewer with --gpus"):
        leonardo.check_holds(13_825)


def test_assumptions_name_what_is_not_verified() -> None:
    assert any("not verified of leonardo: peak_tflops" in line for line in estimate(cluster="leonardo").assumptions)
    assert not any("not verified" in line for line in estimate().assumptions)


def test_the_gram_form_is_said_to_cost_less() -> None:
    config = tiny_config(optim__experts="muon", optim__muon__form="gram")
    found = estimate_step(plan_optimizer_step(config, num_gpus=2), config, get_cluster("jupiter"))
    assert any("Gram form" in line for line in found.assumptions)


def test_the_published_steps_are_met_within_a_quarter() -> None:
    before, after = published_estimates(REFERENCE.model)
    assert (before.published_s, after.published_s) == (41.7, 2.2)
    for figure in (before, after):
        assert 0.75 <= figure.ratio <= 1.25
        assert figure.ratio == figure.estimated_s / figure.published_s
        assert any("inferred" in line for line in figure.assumptions)


def test_the_published_steps_follow_from_arithmetic() -> None:
    experts, dense = 74 * 3 * 384, 74 * (2 * 6144 * 6144 + 2 * 2048 * 6144 + 3 * 1792 * 6144)
    before, after = (parts(figure) for figure in published_estimates(REFERENCE.model))
    assert after["experts_newton_schulz"] == pytest.approx(experts / 384 * EXPERT / JUPITER_FLOPS)
    # All dense matrices reach each of 96 nodes once, over four network cards.
    assert after["dense_gather"] == pytest.approx(2 * dense * (95 / 96) / (4 * JUPITER_NETWORK))
    # A quarter of all experts reaches each GPU, over its own card.
    assert before["experts_gather"] == pytest.approx(2 * 1792 * 6144 * experts / 4 * (95 / 96) / JUPITER_NETWORK)
    assert before["experts_newton_schulz"] == pytest.approx(experts / 4 * EXPERT / JUPITER_FLOPS)
    for name in ("dense_newton_schulz", "dense_gather", "element_wise"):
        assert before[name] == after[name]


def test_other_readings_are_shown_right_or_wrong() -> None:
    for figure, size in zip(published_estimates(REFERENCE.model), (16, 8), strict=True):
        ratios = dict(figure.readings)
        assert len(ratios) == size
        assert ratios[Reading()] == figure.estimated_s
        assert all(seconds > 0 for seconds in ratios.values())
        assert min(ratios.values()) < figure.estimated_s < max(ratios.values())
    before, after = (dict(figure.readings) for figure in published_estimates(REFERENCE.model))
    assert before[Reading(ep=8)] < 0.75 * 41.7
    assert before[Reading(ep=1)] > 1.25 * 41.7
    # 19.8 GB over one card instead of four.
    gather = 4 * parts(published_estimates(REFERENCE.model)[1])["dense_gather"] * (383 / 384) / (95 / 96)
    alone = after[Reading(node_shares=False)] - after[Reading()] + gather / 4 * (95 / 96) / (383 / 384)
    assert alone == pytest.approx(gather)


def test_other_models_have_nothing_published() -> None:
    assert published_estimates(tiny_config().model) == ()


def test_the_documentation_quotes_the_figures_of_the_code() -> None:
    """Every table of milliseconds and of readings there is what the code returns, row by row."""
    text = DOCUMENT.read_text()
    quoted = {name: float(ms) for name, ms in re.findall(r"^\| `(\w+)` \| ([\d.]+) ms \|", text, re.MULTILINE)}
    found = estimate()
    expected = {name: seconds for name, seconds in parts(found).items() if seconds}
    expected |= {"hidden_s": found.hidden_s, "step_s": found.step_s, "without_replicas_s": found.without_replicas_s}
    assert quoted == {name: round(1000 * seconds, 1) for name, seconds in expected.items()}

    row = r"^\| (before|after) \| (\d) \| (\w+) \| (yes|no) \| (yes|no) \| ([\d.]+) s \| ([\d.]+) \|$"
    found_rows = {row[:5]: (float(row[5]), float(row[6])) for row in re.findall(row, text, re.MULTILINE)}
    words = {True: "yes", False: "no"}
    assert found_rows == {
        (when, str(reading.ep), reading.gather_dtype, words[reading.overlapped], words[reading.node_shares]): (
            round(seconds, 1),
            round(seconds / figure.published_s, 2),
        )
        for when, figure in zip(("before", "after"), published_estimates(REFERENCE.model), strict=True)
        for reading, seconds in figure.readings
    }
