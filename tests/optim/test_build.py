"""Who optimizes what, and that AdamW and the state are what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import small_batch, small_model, small_model_config

from amalthea.model.transformer import Transformer
from amalthea.optim.build import Optimizers
from amalthea.optim.config import AdamWConfig, MuonConfig, OptimConfig

MODEL: dict[str, Any] = {"num_dense_layers": 1, "dense_hidden_size": 12}

GROUPS = {
    "embedding or head": ["embed.weight", "head.weight"],
    "hidden matrix": [
        "blocks.0.attn.wq.weight",
        "blocks.0.attn.wk.weight",
        "blocks.0.attn.wv.weight",
        "blocks.0.attn.wo.weight",
        "blocks.0.mlp.w_gate.weight",
        "blocks.0.mlp.w_up.weight",
        "blocks.0.mlp.w_down.weight",
        "blocks.1.attn.wq.weight",
        "blocks.1.attn.wk.weight",
        "blocks.1.attn.wv.weight",
        "blocks.1.attn.wo.weight",
        "blocks.1.moe.shared.w_gate.weight",
        "blocks.1.moe.shared.w_up.weight",
        "blocks.1.moe.shared.w_down.weight",
    ],
    "routed expert": ["blocks.1.moe.experts.w_gate", "blocks.1.moe.experts.w_up", "blocks.1.moe.experts.w_down"],
    "router": ["blocks.1.moe.router.weight"],
    "vector": [
        f"blocks.{layer}.{name}.weight"
        for layer in (0, 1)
        for name in ("attn_norm", "attn.q_norm", "attn.k_norm", "ffn_norm")
    ]
    + ["norm.weight"],
}


def backward(model: Transformer, *, seed: int = 0) -> None:
    config = model.config
    model(*small_batch(config, seed=seed)).result.backward()


def take_step(optimizers: Optimizers, *, lr_factor: float = 1.0) -> None:
    optimizers.reduce_over_replicas()
    optimizers.step(lr_factor=lr_factor)


@pytest.mark.parametrize("experts", ["muon", "adamw"])
@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_every_parameter_goes_to_its_optimizer(experts: Any, matrices: Any) -> None:
    model = small_model(small_model_config(**MODEL))
    optimizers = Optimizers(model.named_parameters(), OptimConfig(experts=experts, matrices=matrices))
    taker = {"routed expert": experts, "hidden matrix": matrices}
    expected = {name: (taker.get(why, "adamw"), why) for why, names in GROUPS.items() for name in names}
    assert {a.name: (a.optimizer, a.reason) for a in optimizers.assignments} == expected
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {a.name: a.shape for a in optimizers.assignments} == shapes
    rates = {"adamw"} | ({"muon"} & {experts, matrices})
    assert optimizers.learning_rates.keys() == rates


def test_every_parameter_moves_and_gradients_are_dropped() -> None:
    model = small_model(small_model_config(**MODEL))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = Optimizers(model.named_parameters(), OptimConfig())
    backward(model)
    take_step(optimizers)
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    optimizers.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("fused", "tolerance"), [(True, 0.0), (False, 1e-6)])
def test_adamw_equals_torch(fused: bool, tolerance: float) -> None:
    """Over five steps with a changing rate; bit for bit against the fused one, which computes the same way."""
    adamw = AdamWConfig(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-7, weight_decay=0.3)
    config = OptimConfig(experts="adamw", matrices="adamw", adamw=adamw)
    model, twin = (small_model(small_model_config(**MODEL)) for _ in range(2))
    optimizers = Optimizers(model.named_parameters(), config)
    groups = [
        {"params": [p for p in twin.parameters() if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in twin.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-7, fused=fused)
    for step in range(5):
        # Both get this model's gradients, so that only the optimizers are compared.
        model.zero_grad()
        backward(model, seed=step)
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert parameter.grad is not None
            other.grad = parameter.grad.clone()
        take_step(optimizers, lr_factor=0.5 + step / 10)
        for group in reference.param_groups:
            group["lr"] = 1e-2 * (0.5 + step / 10)
        reference.step()
        assert optimizers.learning_rates == {"adamw": 1e-2 * (0.5 + step / 10)}
        for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=tolerance, atol=tolerance, msg=f"{name} at {step}")


def test_weight_decay_spares_norms() -> None:
    config = OptimConfig(adamw=AdamWConfig(lr=0.1, weight_decay=0.5), muon=MuonConfig(lr=0.2, weight_decay=0.5))
    model = small_model(small_model_config(**MODEL))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = Optimizers(model.named_parameters(), config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    take_step(optimizers)
    takers = {a.name: a.optimizer for a in optimizers.assignments}
    for name, parameter in model.named_parameters():
        kept = 1.0 if "norm" in name else {"adamw": 0.95, "muon": 0.9}[takers[name]]
        torch.testing.assert_close(parameter.detach(), before[name] * kept, rtol=1e-6, atol=0, msg=name)


def test_state_has_the_names_and_shapes_of_parameters_from_the_start() -> None:
    model = small_model(small_model_config(**MODEL))
    optimizers = Optimizers(model.named_parameters(), OptimConfig())
    takers = {a.name: a.optimizer for a in optimizers.assignments}
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if takers[name] == "muon":
            expected[f"{name}.momentum"] = shape
        else:
            expected |= {f"{name}.exp_avg": shape, f"{name}.exp_avg_sq": shape, f"{name}.step": ()}
    assert {name: tuple(value.shape) for name, value in optimizers.named_state().items()} == expected
    assert all(value.dtype == torch.float32 for value in optimizers.named_state().values())


def test_state_shares_memory_with_the_optimizers() -> None:
    """What is loaded into it counts, and what a step changes is seen in it."""
    config = OptimConfig(experts="adamw", matrices="adamw")
    runs = []
    for _ in range(2):
        model = small_model()
        runs.append((model, Optimizers(model.named_parameters(), config)))
    (model, optimizers), (other, others) = runs
    backward(model)
    take_step(optimizers)
    others_parameters = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            others_parameters[name].copy_(parameter)
    for name, value in optimizers.named_state().items():
        assert value.any() or ".experts." in name, name
        others.named_state()[name].copy_(value)
    for trained, trainer in runs:
        trainer.zero_grad()
        backward(trained, seed=1)
        take_step(trainer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, others_parameters[name]), name
