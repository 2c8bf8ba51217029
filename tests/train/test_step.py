"""One optimizer step: the same under any accumulation, mesh and recompute, and nothing moves if it is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.tiny import SEQ_LEN, SEQUENCES, Curve, microbatches, run_steps, tiny_batch, tiny_config, whole_state
from torch.distributed.tensor import DTensor

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import TrainingError
from amalthea.core.pieces import Pieces
from amalthea.core.tensors import local_tensor
from amalthea.core.world import World
from amalthea.kernels.attention import Documents
from amalthea.model.init import initialize
from amalthea.model.transformer import Transformer
from amalthea.train.build import Run, build
from amalthea.train.step import StepResult, train_step

EP2: dict[str, Any] = {"parallel__ep": 2}
HSDP_EP2: dict[str, Any] = {"parallel__dp_replicate": 2, "parallel__ep": 2}

# Losses of the router that weigh, no clipping, and an AdamW whose first step is not a sign, which would blow up
# rounding where a gradient is about zero.
ROUTER_LOSSES: dict[str, Any] = {
    "model__moe__aux_loss_coef": 0.5,
    "model__moe__z_loss_coef": 0.1,
    "train__max_grad_norm": None,
    "optim__adamw__eps": 1e-3,
}


def build_run(world: World, config: RunConfig) -> Run:
    return build(config, resolve(config, world_size=world.size), world)


@dataclass(frozen=True)
class Report:
    """One step, with whole gradients and the whole weights after it."""

    result: StepResult
    grads: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def report_step(world: World, config: RunConfig) -> Report:
    run = build_run(world, config)
    run.optimizers.zero_grad = lambda: None  # type: ignore[method-assign]  # keeps the gradients to look at
    result = train_step(run, microbatches(run, 0), lr_factor=1.0, tallies=[1.0, world.rank])
    grads = {}
    for name, parameter in run.model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return Report(result, grads, whole_state(run))


@pytest.fixture(scope="module")
def whole_batch() -> Report:
    """One rank, one microbatch."""
    return run_ranks(1, report_step, tiny_config(**ROUTER_LOSSES))[0]


def relative_errors(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Greatest difference over greatest value, by name."""
    assert got.keys() == expected.keys()
    return {
        name: float((got[name].double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-12))
        for name, want in expected.items()
    }


def test_the_step_is_that_of_the_mean_over_the_whole_batch(whole_batch: Report) -> None:
    """Against plain autograd: mean cross-entropy over labels plus router losses per token, clipped by nothing."""
    config = tiny_config(**ROUTER_LOSSES)
    model = Transformer(config.model)
    initialize(model, seed=config.seed)
    batch = tiny_batch(0, range(SEQUENCES))
    documents = Documents(batch.document_lengths, SEQ_LEN)
    output = model(batch.tokens, documents)
    loss = F.cross_entropy(output.result.flatten(0, 1), batch.labels.flatten())
    router_losses = output.router_losses / batch.tokens.numel()
    (loss + router_losses.sum()).backward()
    result = whole_batch.result
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert (result.balance_loss, result.z_loss) == pytest.approx(router_losses.tolist(), rel=1e-6)
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert max(relative_errors(whole_batch.grads, expected).values()) < 1e-5
    assert result.grad_norm == pytest.approx(math.sqrt(sum(g.double().square().sum() for g in expected.values())))
    assert list(map(list, result.expert_counts)) == output.counts.tolist()


def test_router_losses_have_their_scale() -> None:
    """Where every token visits every expert the balance loss is its coefficient in each layer."""
    config = tiny_config(model__moe__aux_loss_coef=0.25, model__moe__top_k=8)
    result = run_ranks(1, report_step, config)[0].result
    assert result.balance_loss == pytest.approx(0.25 * config.model.num_layers, rel=1e-5)
    assert result.z_loss == 0.0


CUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    # ranks, sequences in a microbatch, mesh
    "1 rank, 2 microbatches": (1, 4, {}),
    "1 rank, 4 microbatches": (1, 2, {}),
    "2 ranks": (2, 4, {}),
    "2 ranks, 2 microbatches": (2, 2, {}),
    "2 ranks, ep2, 4 microbatches": (2, 1, EP2),
    "2 replicas, 2 microbatches": (2, 2, {"parallel__dp_replicate": 2}),
    "4 ranks": (4, 2, {}),
    "4 ranks, ep2, 2 microbatches": (4, 1, EP2),
    "4 ranks, hsdp": (4, 2, {"parallel__dp_replicate": 2}),
    "4 ranks, hsdp-ep2, 2 microbatches": (4, 1, HSDP_EP2),
}


@pytest.mark.case(17)
@pytest.mark.parametrize("cut", CUTS)
def test_router_losses_weigh_the_same_however_the_batch_is_cut(cut: str, whole_batch: Report) -> None:
    """Loss to 1e-6, gradients and weights to 1e-5 of their greatest value: fp32 sums in another order."""
    num_ranks, sequences, mesh = CUTS[cut]
    config = tiny_config(train__microbatch_sequences=sequences, **ROUTER_LOSSES, **mesh)
    resolved = resolve(config, world_size=num_ranks)
    assert resolved.accumulation_steps * sequences * num_ranks == SEQUENCES
    reports = run_ranks(num_ranks, report_step, config)
    for report in reports:
        got, expected = report.result, whole_batch.result
        for figure in ("loss", "balance_loss", "z_loss"):
            assert getattr(got, figure) == pytest.approx(getattr(expected, figure), rel=1e-6), figure
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert got.expert_counts == expected.expert_counts
        assert got.totals == (num_ranks, sum(range(num_ranks))), "tallies are summed over ranks"
    assert max(relative_errors(reports[0].grads, whole_batch.grads).values()) < 1e-5
    assert max(relative_errors(reports[0].weights, whole_batch.weights).values()) < 1e-5


@pytest.mark.case(17)
def test_the_router_losses_are_seen_in_the_gradient(whole_batch: Report) -> None:
    """Otherwise the comparison above would hold whatever their scale."""
    without = {"model__moe__aux_loss_coef": 0.0, "model__moe__z_loss_coef": 0.0}
    plain = run_ranks(1, report_step, tiny_config(**(ROUTER_LOSSES | without)))[0]
    errors = relative_errors(plain.grads, whole_batch.grads)
    assert all(error > 0.01 for name, error in errors.items() if "router" in name)
    assert plain.result.loss == pytest.approx(whole_batch.result.loss, rel=1e-6)


STEPS, RATE = 3, 0.01
BALANCED: dict[str, Any] = {"model__moe__bias_update_rate": RATE, "optim__adamw__eps": 1e-3}


@pytest.fixture(scope="module")
def balanced() -> Curve:
    return run_ranks(1, run_steps, tiny_config(**BALANCED), STEPS)[0]


def biases_of(curve: Curve) -> list[list[float]]:
    return [curve.parameters[f"blocks.{layer}.moe.router.bias"].tolist() for layer in (0, 1)]


@pytest.mark.case(4)
def test_the_bias_moves_one_step_towards_the_mean_load_per_optimizer_step(balanced: Curve) -> None:
    expected = [[0.0] * 8, [0.0] * 8]
    for counts in balanced.counts:
        for layer, layer_counts in enumerate(counts):
            assert sum(layer_counts) == SEQ_LEN * SEQUENCES * 2, "every token is counted once for each choice"
            mean = sum(layer_counts) / 8
            for expert, count in enumerate(layer_counts):
                expected[layer][expert] += RATE * ((count < mean) - (count > mean))
    for layer in (0, 1):
        assert biases_of(balanced)[layer] == pytest.approx(expected[layer], abs=1e-6)
    assert any(map(any, expected))


@pytest.mark.case(4)
@pytest.mark.parametrize(
    ("num_ranks", "sequences", "recompute", "mesh"),
    [
        (1, 8, "block", {}),
        (1, 4, "none", {}),
        (1, 2, "block", {}),
        (2, 2, "block", {}),
        (4, 1, "none", {}),
        (4, 1, "block", HSDP_EP2),
    ],
)
def test_counts_and_biases_do_not_depend_on_recompute_and_accumulation(
    num_ranks: int, sequences: int, recompute: str, mesh: dict[str, Any], balanced: Curve
) -> None:
    config = tiny_config(train__microbatch_sequences=sequences, memory__recompute=recompute, **BALANCED, **mesh)
    for curve in run_ranks(num_ranks, run_steps, config, STEPS):
        assert curve.counts == balanced.counts
        assert biases_of(curve) == biases_of(balanced)


@pytest.mark.parametrize(
    ("num_ranks", "mesh"), [(1, {}), (2, {"train__microbatch_sequences": 2}), (4, EP2)], ids=["1", "2", "4-ep2"]
)
def test_recompute_changes_no_bit(num_ranks: int, mesh: dict[str, Any]) -> None:
    kept, recomputed = (
        run_ranks(num_ranks, run_steps, tiny_config(memory__recompute=recompute, **mesh), STEPS)[0]
        for recompute in ("none", "block")
    )
    assert recomputed.losses == kept.losses
    assert recomputed.grad_norms == kept.grad_norms
    assert [name for name, w in kept.parameters.items() if not torch.equal(w, recomputed.parameters[name])] == []


def saved_activations(world: World, recompute: str) -> int:
    """Bytes that autograd keeps in a forward pass, each storage once, parameters and inputs left out."""
    run = build_run(world, tiny_config(memory__recompute=recompute))
    known = {p.untyped_storage().data_ptr() for p in [*run.model.parameters(), *run.model.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = tiny_batch(0, range(SEQUENCES))
    documents = Documents(batch.document_lengths, SEQ_LEN)
    hidden = run.model.embed(batch.tokens).detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run.model.groups[0](hidden, documents, run.model.rope)
    assert output.hidden.shape == hidden.shape
    return sum(kept.values())


def test_recompute_keeps_the_blocks_input_only() -> None:
    hidden_bytes = SEQUENCES * SEQ_LEN * 32 * 4
    (recomputed,), (kept,) = (run_ranks(1, saved_activations, recompute) for recompute in ("block", "none"))
    assert recomputed <= hidden_bytes
    assert kept > 10 * hidden_bytes


def bias_identity(world: World, config: RunConfig) -> list[bool]:
    """Per layer: the bias is the same object on the same memory after a step, has moved, and is what is saved."""
    run = build_run(world, config)
    layers = run.model.moe_layers()
    before = [(moe.router.bias, moe.router.bias.data_ptr(), moe.router.bias.clone()) for moe in layers]
    train_step(run, microbatches(run, 0), lr_factor=1.0, tallies=())
    saved = run.named_tensors()
    outcome = []
    for index, (moe, (tensor, address, values)) in enumerate(zip(layers, before, strict=True)):
        is_same = moe.router.bias is tensor and tensor.data_ptr() == address
        in_checkpoint = local_tensor(saved[f"model.blocks.{index}.moe.router.bias"])
        is_saved = in_checkpoint.data_ptr() == address and torch.equal(in_checkpoint, tensor)
        outcome.append(is_same and is_saved and not torch.equal(tensor, values))
    return outcome


@pytest.mark.case(3)
@pytest.mark.parametrize(("num_ranks", "mesh"), [(1, {}), (4, HSDP_EP2)], ids=["1", "4-hsdp-ep2"])
def test_the_bias_moves_in_place(num_ranks: int, mesh: dict[str, Any]) -> None:
    assert run_ranks(num_ranks, bias_identity, tiny_config(**mesh)) == [[True, True]] * num_ranks


def snapshot(run: Run) -> dict[str, list[torch.Tensor]]:
    """This rank's part of everything that a checkpoint holds."""
    return {
        name: [piece.tensor.clone() for piece in tensor.pieces]
        if isinstance(tensor, Pieces)
        else [local_tensor(tensor).detach().clone()]
        for name, tensor in run.named_tensors().items()
    }


def poison(run: Run, where: str) -> None:
    if where == "weight":
        local_tensor(run.model.moe_layers()[0].experts.w_up.data)[0, 0, 0] = math.inf
    else:  # only the gradient: the loss stays finite
        run.model.norm.register_forward_hook(
            lambda module, args, out: out.register_hook(lambda grad: grad * math.inf) and None
        )


def step_poisoned(world: World, config: RunConfig, where: str) -> tuple[str, list[str], list[str]]:
    """The error after a good step and a bad one, what the good one did not change, and what the bad one changed."""
    run = build_run(world, config)
    start = snapshot(run)
    train_step(run, microbatches(run, 0), lr_factor=1.0, tallies=())
    good = snapshot(run)
    if world.rank == world.size - 1:
        poison(run, where)
    before = snapshot(run)
    with pytest.raises(TrainingError) as caught:
        train_step(run, microbatches(run, 1), lr_factor=1.0, tallies=())
    after = snapshot(run)
    unmoved = [
        name
        for name, tensors in good.items()
        if any(torch.equal(a, b) and a.numel() for a, b in zip(tensors, start[name], strict=True))
    ]
    moved = [
        name
        for name, tensors in after.items()
        if not all(torch.equal(a, b) for a, b in zip(tensors, before[name], strict=True))
    ]
    return str(caught.value), unmoved, moved


@pytest.mark.parametrize(("num_ranks", "mesh"), [(1, {}), (2, {}), (4, HSDP_EP2)], ids=["1", "2", "4-hsdp-ep2"])
@pytest.mark.parametrize("where", ["weight", "gradient"])
def test_a_step_that_is_not_finite_is_an_error_on_every_rank_and_changes_nothing(
    where: str, num_ranks: int, mesh: dict[str, Any]
) -> None:
    """Weights, momenta, AdamW's state and step, and the biases stay bit for bit."""
    config = tiny_config(optim__experts="muon", optim__matrices="muon", **mesh)
    for message, unmoved, moved in run_ranks(num_ranks, step_poisoned, config, where):
        assert moved == []
        assert unmoved == [], "the snapshot sees a step"
        assert "is not finite; the weights were left as they were" in message
        assert message.startswith("the gradient norm" if where == "gradient" else "the loss and the gradient norm")
