"""The router: the bias chooses and does not weigh; losses and counts equal the papers' formulas.

Shape legend: B sequences, S tokens per sequence, T = B·S tokens, D hidden, E experts, K choices per token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import small_batch, small_model, small_model_config

from amalthea.model.config import MoEConfig
from amalthea.model.moe import MoE, Router

B, S, D, E, K = 3, 7, 10, 6, 2


def make_router(*, seed: int = 0, **changes: Any) -> tuple[Router, torch.Tensor]:
    """A router and input [B, S, D] in float64."""
    values: dict[str, Any] = {"num_experts": E, "top_k": K, "expert_hidden_size": 4}
    config = MoEConfig(**(values | changes))
    generator = torch.Generator().manual_seed(seed)
    router = Router(D, config)
    router.weight = torch.nn.Parameter(torch.randn(E, D, generator=generator, dtype=torch.float64) / 2)
    return router, torch.randn(B, S, D, generator=generator, dtype=torch.float64)


def scores_of(router: Router, x: torch.Tensor) -> torch.Tensor:
    """Sigmoid scores [T, E]."""
    return 1 / (1 + torch.exp(-(x.flatten(0, 1) @ router.weight.T)))


def test_chooses_the_greatest_scores_and_weighs_by_their_share() -> None:
    router, x = make_router(route_scale=2.5)
    routing = router(x)
    scores = scores_of(router, x)
    assert routing.experts.dtype == torch.int64
    assert routing.experts.shape == routing.weights.shape == (B * S, K)
    for token in range(B * S):
        best = sorted(range(E), key=lambda e, t=token: -scores[t, e].item())[:K]
        assert set(routing.experts[token].tolist()) == set(best)
        chosen = scores[token, routing.experts[token]]
        torch.testing.assert_close(routing.weights[token], 2.5 * chosen / chosen.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        routing.weights.sum(1), torch.full((B * S,), 2.5, dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_weights_may_stay_the_scores() -> None:
    router, x = make_router(normalize_weights=False, route_scale=0.5)
    routing = router(x)
    expected = 0.5 * scores_of(router, x).gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, expected, rtol=1e-12, atol=0)


def test_the_bias_chooses_but_does_not_weigh() -> None:
    router, x = make_router()
    plain = router(x)
    router.bias[4] = 10.0
    biased = router(x)
    assert (biased.experts == 4).any(dim=1).all(), "every token goes where the bias is"
    assert not (plain.experts == 4).any(dim=1).all()
    chosen = scores_of(router, x).gather(1, biased.experts)
    torch.testing.assert_close(biased.weights, chosen / chosen.sum(1, keepdim=True), rtol=1e-12, atol=0)
    router.bias.fill_(10.0)
    assert torch.equal(router(x).experts, plain.experts), "a bias that is equal everywhere changes nothing"


def test_gradients_reach_the_router_through_the_weights_alone() -> None:
    router, x = make_router()
    router.bias[4] = 10.0
    upstream = torch.randn(B * S, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    routing = router(x)
    assert not routing.experts.requires_grad
    assert not router.bias.requires_grad
    (grad,) = torch.autograd.grad(routing.weights, router.weight, upstream)
    chosen = scores_of(router, x).gather(1, routing.experts)
    (expected,) = torch.autograd.grad(chosen / chosen.sum(1, keepdim=True), router.weight, upstream)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


def balance_loss(router: Router, x: torch.Tensor, alpha: float) -> torch.Tensor:
    """DeepSeek-V3 (arXiv 2412.19437) equations 17 to 20 of each sequence, times its tokens, summed."""
    total = torch.zeros((), dtype=torch.float64)
    for sequence in x:
        scores = scores_of(router, sequence[None])
        chosen = (scores + router.bias).topk(K, dim=1).indices
        for expert in range(E):
            f = E / (K * S) * sum(int(expert in row) for row in chosen.tolist())
            p = sum(scores[t, expert] / scores[t].sum() for t in range(S)) / S
            total = total + S * alpha * f * p
    return total


def z_loss(router: Router, x: torch.Tensor, coef: float) -> torch.Tensor:
    """ST-MoE (arXiv 2202.08906) equation 5, times its tokens."""
    logits = x.flatten(0, 1) @ router.weight.T
    return coef * torch.stack([torch.log(torch.exp(token).sum()) ** 2 for token in logits]).sum()


@pytest.mark.parametrize("bias", [0.0, 0.4])
@pytest.mark.parametrize(("alpha", "coef"), [(0.3, 0.0), (0.0, 0.07), (0.3, 0.07)])
def test_losses_equal_the_papers_in_value_and_gradient(alpha: float, coef: float, bias: float) -> None:
    router, x = make_router(aux_loss_coef=alpha, z_loss_coef=coef)
    router.bias[1] = bias
    x.requires_grad_()
    losses = router(x).losses
    for got, expected in ((losses[0], balance_loss(router, x, alpha)), (losses[1], z_loss(router, x, coef))):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        wanted = torch.autograd.grad(expected, (router.weight, x), retain_graph=True)
        grads = torch.autograd.grad(got, (router.weight, x), retain_graph=True)
        for left, right in zip(grads, wanted, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_no_losses_unless_asked_for() -> None:
    router, x = make_router()
    losses = router(x).losses
    assert not losses.requires_grad
    assert not losses.any()


def test_the_balance_loss_is_its_coefficient_times_tokens_where_all_is_even() -> None:
    router, x = make_router(aux_loss_coef=0.3, top_k=E)
    assert router(x).losses[0].item() == pytest.approx(0.3 * B * S, rel=1e-12)


def test_it_computes_in_fp32_from_bf16() -> None:
    router, x = make_router(aux_loss_coef=0.3, z_loss_coef=0.07)
    router.weight = torch.nn.Parameter(router.weight.detach().bfloat16())
    low = router(x.bfloat16())
    assert (low.weights.dtype, low.losses.dtype) == (torch.float32, torch.float32)
    router.weight = torch.nn.Parameter(router.weight.detach().double())
    high = router(x.bfloat16().double())
    torch.testing.assert_close(low.weights.double(), high.weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(low.losses.double(), high.losses, rtol=1e-5, atol=1e-6)


def test_counts_are_those_of_the_choices() -> None:
    config = small_model_config(moe__top_k=3)
    model = small_model(config)
    choices = []
    for moe in model.moe_layers():
        moe.router.register_forward_hook(lambda module, args, routing: choices.append(routing.experts))
    output = model(*small_batch(config))
    assert len(choices) == 2
    expected = [torch.bincount(experts.flatten(), minlength=8).tolist() for experts in choices]
    assert output.counts.tolist() == expected
    assert output.counts.dtype == torch.int64


def test_the_layer_equals_a_loop_over_tokens() -> None:
    """Routed experts weighted by the router, and shared ones added, in float64."""
    torch.manual_seed(0)
    config = MoEConfig(num_experts=E, top_k=K, expert_hidden_size=4, num_shared_experts=2, route_scale=1.5)
    moe = MoE(D, config)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    moe = moe.double()
    x = torch.randn(B, S, D, dtype=torch.float64)
    out, _, _ = moe(x)
    routing = moe.router(x)

    def swiglu(row: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = gate @ row
        return down @ (hidden / (1 + torch.exp(-hidden)) * (up @ row))

    experts, shared = moe.experts, moe.shared
    assert shared is not None
    for token, row in enumerate(x.flatten(0, 1)):
        expected = swiglu(row, shared.w_gate.weight, shared.w_up.weight, shared.w_down.weight)
        for expert, weight in zip(routing.experts[token], routing.weights[token], strict=True):
            expected = expected + weight * swiglu(
                row, experts.w_gate[expert], experts.w_up[expert], experts.w_down[expert]
            )
        torch.testing.assert_close(out.flatten(0, 1)[token], expected, rtol=1e-10, atol=1e-12)
