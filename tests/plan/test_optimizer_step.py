"""The optimizer plan: against built models, the issue's bars at full size, and what it says aloud."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from support.models import small_model, small_model_config
from support.tiny import tiny_config

from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.flexshard.check import check_layout
from amalthea.model.config import ModelConfig
from amalthea.model.transformer import Transformer
from amalthea.optim.build import Optimizers
from amalthea.optim.config import OptimConfig
from amalthea.plan.optimizer_step import OptimizerPlan, default_gpus, plan_optimizer_step
from amalthea.plan.shapes import parameter_shapes
from amalthea.recipes.europa_1t import europa_1t
from amalthea.recipes.moe_small import moe_small
from amalthea.recipes.quickstart import quickstart

MODELS: dict[str, ModelConfig] = {
    "plain": small_model_config(),
    "dense layers": small_model_config(num_dense_layers=1, dense_hidden_size=12),
    "only dense": small_model_config(num_dense_layers=2, dense_hidden_size=12),
    "tied": small_model_config(tie_embeddings=True),
    "no norms on heads": small_model_config(qk_norm=False),
    "no shared expert": small_model_config(moe__num_shared_experts=0),
    "two shared experts": small_model_config(moe__num_shared_experts=2),
    "reference": europa_1t().model,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_names_and_shapes_are_the_models_in_its_order(model: ModelConfig) -> None:
    with torch.device("meta"):
        built = Transformer(model)
    assert parameter_shapes(model) == [(name, tuple(p.shape)) for name, p in built.named_parameters()]


@pytest.fixture(scope="module")
def reference() -> OptimizerPlan:
    return plan_optimizer_step(europa_1t(), num_gpus=1536)


def test_the_reference_model_keeps_within_five_percent_of_the_bound(reference: OptimizerPlan) -> None:
    figures = reference.to_json()
    assert figures["grid"] == {"num_replicas": 4, "num_ranks": 384, "ep": 4, "efsdp": 96}
    assert figures["units_by_kind"] == {"expert": 74 * 3 * 384, "matrix": 74 * 7, "head": 0}
    assert figures["units_local"] == 74 * 3 * 384
    assert figures["units_routed"] == 74 * 7
    assert figures["units"] == figures["units_local"] + figures["units_routed"]
    assert figures["imbalance"] <= 1.05
    bound = max(figures["flops"]["mean"], figures["flops"]["largest_unit"])
    assert figures["flops"]["busiest"] / bound == pytest.approx(figures["imbalance"])


def test_experts_of_the_reference_model_send_nothing_inside_a_replica(reference: OptimizerPlan) -> None:
    figures = reference.to_json()
    assert figures["bytes_sent_by_part"]["all_to_all_experts"] == 0
    assert figures["collectives_by_kind"]["all_to_all"] == 2
    assert figures["experts_storage"] == "whole"
    # One replica has no other to send to, and then experts alone need no collective at all.
    alone = europa_1t().model_copy(update={"optim": OptimConfig(matrices="adamw"), "parallel": _parallel(ep=4)})
    figures = plan_optimizer_step(alone, num_gpus=384).to_json()
    assert (figures["bytes_sent"], figures["collectives"], figures["units_routed"]) == (0, 0, 0)


def _parallel(**degrees: Any) -> Any:
    return europa_1t().parallel.model_copy(update={"dp_replicate": 1, **degrees})


def test_the_reference_layout_is_sound(reference: OptimizerPlan) -> None:
    check_layout(reference.layout, max_scratch_bytes=int(reference.ledger.assembled.max()) * 2)


def test_owning_divides_momentum_by_the_replicas(reference: OptimizerPlan) -> None:
    config = europa_1t()
    repeated = config.model_copy(update={"optim": config.optim.model_copy(update={"replicas": "repeated"})})
    plan = plan_optimizer_step(repeated, num_gpus=1536)
    owning, every = reference.to_json(), plan.to_json()
    assert every["momentum_bytes_mean"] == 4 * owning["momentum_bytes_mean"]
    assert every["replicas"] == "repeated"
    assert every["bytes_sent_by_part"]["replicas_muon"] == 0


def test_momentum_may_be_half_as_wide() -> None:
    wide, narrow = (
        plan_optimizer_step(muon_config(optim__muon__momentum_dtype=dtype), num_gpus=4).to_json()["momentum_bytes"]
        for dtype in ("fp32", "bf16")
    )
    assert wide == 2 * narrow > 0


def test_the_command_plans_the_reference_model_in_seconds() -> None:
    """Under ten seconds on the processor: the wall's would tell how busy the machine is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "amalthea", "plan", "europa-1t", "--optimizer", "--gpus", "1536", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    document = json.loads(result.stdout)
    assert {"model", "optimizer"} <= set(document)
    assert document["optimizer"]["gpus"] == 1536


def test_planning_does_not_import_torch() -> None:
    code = (
        "import sys, amalthea.plan.optimizer_step, amalthea.plan.optimizer_published; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("experts", ["muon", "adamw"])
@pytest.mark.parametrize("matrices", ["muon", "adamw"])
@pytest.mark.parametrize("per_head", [False, True])
def test_counts_equal_those_over_a_built_model(experts: Any, matrices: Any, per_head: bool) -> None:
    config = tiny_config(
        model__num_dense_layers=1,
        model__dense_hidden_size=24,
        optim__experts=experts,
        optim__matrices=matrices,
        optim__muon__per_head=per_head,
    )
    parameters = dict(small_model(config.model).named_parameters())
    optimizers = Optimizers(parameters.items(), config.optim, head_dim=config.model.head_dim)
    plan = plan_optimizer_step(config, num_gpus=1)
    figures = plan.to_json()

    tensors, params = Counter(), Counter()
    for assignment in optimizers.assignments:
        tensors[assignment.optimizer] += 1
        params[assignment.optimizer] += parameters[assignment.name].numel()
    for optimizer in ("muon", "adamw"):
        groups = [group for group in plan.groups if group.optimizer == optimizer]
        assert sum(group.tensors for group in groups) == tensors[optimizer]
        assert sum(group.params for group in groups) == params[optimizer]
    assert (figures["adamw"]["tensors"], figures["adamw"]["params"]) == (tensors["adamw"], params["adamw"])
    assert plan.adamw_elements == params["adamw"]
    state = optimizers.named_state()
    assert figures["momentum_bytes"] == 4 * sum(t.numel() for name, t in state.items() if name.endswith(".momentum"))
    if optimizers.muon is not None:
        assert plan.layout == optimizers.muon.layout
    assert figures["units"] == sum(group.units for group in plan.groups)


def test_matrices_that_fall_to_adamw_are_listed() -> None:
    config = tiny_config(optim__experts="muon", optim__matrices="adamw")
    adamw = plan_optimizer_step(config, num_gpus=4).to_json()["adamw"]
    blocks = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "moe.router", "moe.shared.w_gate", "moe.shared.w_up")
    expected = {"embed", "head", "blocks.*.moe.shared.w_down", *(f"blocks.*.{name}" for name in blocks)}
    assert set(adamw["matrices"]) == {f"{name}.weight" for name in expected}


def test_a_setting_by_name_splits_a_kind_by_its_takers() -> None:
    plan = plan_optimizer_step(muon_config(optim__by_name={"blocks.1.attn.wo.weight": "adamw"}), num_gpus=4)
    found = {(g.optimizer, g.tensors, g.units) for g in plan.groups if g.pattern == "blocks.*.attn.wo.weight"}
    assert found == {("muon", 1, 1), ("adamw", 1, 0)}
    assert "blocks.*.attn.wo.weight" in plan.to_json()["adamw"]["matrices"]


def muon_config(**overrides: Any) -> RunConfig:
    return tiny_config(**{"optim__experts": "muon", "optim__matrices": "muon", **overrides})


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "storage", "words"),
    [
        (4, {}, "whole", "sends nothing for them"),
        (3, {}, "whole", "sends nothing for them"),
        (8, {"parallel__dp_replicate": 2}, "whole", "inside a replica"),
        (16, {}, "rows", "more ranks than experts, so experts are cut by rows: routed path"),
        (6, {"model__moe__num_experts": 4}, "whole", "2 ranks hold none"),
        (16, {"optim__experts": "adamw"}, "adamw", "AdamW takes the experts"),
        (2, {"model__num_dense_layers": 2, "model__dense_hidden_size": 16}, "none", "no layer has routed experts"),
    ],
)
def test_storage_of_experts_is_said_aloud(num_gpus: int, overrides: dict[str, Any], storage: str, words: str) -> None:
    figures = plan_optimizer_step(muon_config(**overrides), num_gpus=num_gpus).to_json()
    assert figures["experts_storage"] == storage
    assert words in figures["storage"]
    assert (figures["bytes_sent_by_part"]["all_to_all_experts"] > 0) == (storage == "rows")


def test_ranks_follow_from_the_recipe_where_none_are_given() -> None:
    assert [default_gpus(recipe()) for recipe in (europa_1t, moe_small, quickstart)] == [1536, 64, 1]
    fixed = europa_1t().model_copy(update={"parallel": _parallel(dp_replicate=2, dp_shard=96)})
    assert default_gpus(fixed) == 192


def test_degrees_that_do_not_fit_are_refused_but_a_batch_is_no_matter() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.dp_replicate is 4"):
        plan_optimizer_step(europa_1t(), num_gpus=1534)
    with pytest.raises(ConfigError, match=r"parallel\.ep is 4"):
        plan_optimizer_step(europa_1t(), num_gpus=1532)
    assert plan_optimizer_step(muon_config(), num_gpus=5).num_gpus == 5
    # Eight passes of the run's batch share a gather; here there are fewer.
    several = muon_config(memory__sequences_per_gather=8, train__microbatch_sequences=1)
    assert plan_optimizer_step(several, num_gpus=4).num_gpus == 4


def test_adamw_is_reduced_where_replicas_own() -> None:
    plan = plan_optimizer_step(muon_config(parallel__dp_replicate=2), num_gpus=4)
    model = plan_optimizer_step(muon_config(), num_gpus=1)
    # A ring over two replicas sends half of the buffer twice. Rank 0 of two has half of everything here.
    assert plan.adamw_elements * 2 == model.adamw_elements
    assert plan.to_json()["bytes_sent_by_part"]["replicas_adamw"] == 4 * plan.adamw_elements
    assert plan.collectives == {"all_to_all": 2, "reduce_scatter": 1, "all_gather": 1, "all_reduce": 1}
