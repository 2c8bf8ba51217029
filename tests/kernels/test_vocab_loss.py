"""The chunked loss equals the loss over whole logits, value and gradients, and never makes them.

Shape legend: T tokens, D hidden, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gpu_products import gpu_products
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amalthea.kernels.vocab_loss import token_losses, vocab_loss_plain, vocab_loss_sum

T, D, V = 29, 12, 37
IGNORED = -100


def draw(dtype: torch.dtype = torch.float32, *, kept: str = "some") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden, weight and labels, of which a third is ignored, or all, or none."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (T,), generator=generator)
    labels[{"some": slice(None, None, 3), "none": slice(None), "all": slice(0, 0)}[kept]] = IGNORED
    return hidden.to(dtype), weight.to(dtype), labels


def with_gradients(function: Any, hidden: torch.Tensor, weight: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    """The loss and its gradients by hidden and weight, scaled by 0.3 as a mean would."""
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    loss = function(*leaves, *args)
    return [loss.detach(), *torch.autograd.grad(0.3 * loss, leaves)]


def chunked(chunk_tokens: int) -> Any:
    return lambda hidden, weight, labels: vocab_loss_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)


def by_definition(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One token at a time in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for row, label in zip(hidden.double(), labels.tolist(), strict=True):
        if label != IGNORED:
            logits = weight.double() @ row
            total = total - (logits[label] - logits.exp().sum().log())
    return total


@pytest.mark.parametrize("kept", ["some", "all", "none"])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 28, T, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_equals_the_definition_and_the_twin(kept: str, chunk_tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels = draw(dtype, kept=kept)
    got = with_gradients(chunked(chunk_tokens), hidden, weight, labels)
    twin = with_gradients(vocab_loss_plain, hidden, weight, labels)
    if kept != "none":
        expected = with_gradients(by_definition, hidden, weight, labels)
    else:
        expected = [torch.zeros_like(tensor) for tensor in got]
        assert not any(tensor.any() for tensor in got)
    for left, middle, right in zip(got, twin, expected, strict=True):
        assert left.dtype == dtype
        scale = float(right.abs().max())
        torch.testing.assert_close(left.double(), right.double(), rtol=tolerance, atol=tolerance * scale)
        torch.testing.assert_close(middle.double(), right.double(), rtol=tolerance, atol=tolerance * scale)


def test_an_ignored_row_gives_and_gets_nothing() -> None:
    hidden, weight, labels = draw()
    before = with_gradients(chunked(8), hidden, weight, labels)
    changed = hidden.clone()
    changed[labels == IGNORED] = 50.0
    after = with_gradients(chunked(8), changed, weight, labels)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert not before[1][labels == IGNORED].any()
    assert before[1][labels != IGNORED].any(dim=1).all()


def test_another_ignored_label() -> None:
    hidden, weight, labels = draw()
    renamed = labels.where(labels != IGNORED, -1)
    got = vocab_loss_sum(hidden, weight, renamed, chunk_tokens=8, ignored=-1)
    assert torch.equal(got, vocab_loss_sum(hidden, weight, labels, chunk_tokens=8))
    assert torch.equal(
        token_losses(hidden, weight, renamed, chunk_tokens=8, ignored=-1),
        token_losses(hidden, weight, labels, chunk_tokens=8),
    )


def test_bf16_is_no_worse_than_whole_logits_in_bf16() -> None:
    hidden, weight, labels = draw(torch.bfloat16)
    exact = with_gradients(by_definition, hidden, weight, labels)
    got = with_gradients(chunked(8), hidden, weight, labels)
    twin = with_gradients(vocab_loss_plain, hidden, weight, labels)
    assert [tensor.dtype for tensor in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for left, right, true in zip(got, twin, exact, strict=True):
        scale = true.double().norm()
        error, twin_error = ((tensor.double() - true.double()).norm() / scale for tensor in (left, right))
        assert error < 0.01
        assert error < 1.2 * twin_error + 1e-4


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, labels = draw()
    got = with_gradients(chunked(8), 1e3 * hidden, weight, labels)
    twin = with_gradients(vocab_loss_plain, 1e3 * hidden, weight, labels)
    for left, right in zip(got, twin, strict=True):
        assert left.isfinite().all()
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))


def test_gradcheck_in_float64() -> None:
    hidden, weight, labels = draw(torch.float64)
    leaves = hidden[:5].clone().requires_grad_(), weight[:, :].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: vocab_loss_sum(h, w, labels[:5], chunk_tokens=2), leaves)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_one_side_may_be_frozen(trained: str) -> None:
    hidden, weight, labels = draw()
    _, hidden_grad, weight_grad = with_gradients(chunked(8), hidden, weight, labels)
    leaf = (hidden if trained == "hidden" else weight).clone().requires_grad_()
    args = (leaf, weight) if trained == "hidden" else (hidden, leaf)
    (grad,) = torch.autograd.grad(0.3 * vocab_loss_sum(*args, labels, chunk_tokens=8), leaf)
    assert torch.equal(grad, hidden_grad if trained == "hidden" else weight_grad)


@pytest.mark.parametrize("chunk_tokens", [4, T])
def test_losses_by_token(chunk_tokens: int) -> None:
    hidden, weight, labels = draw()
    losses = token_losses(hidden, weight.requires_grad_(), labels, chunk_tokens=chunk_tokens)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad
    assert not losses[labels == IGNORED].any()
    each = [by_definition(hidden[i : i + 1], weight, labels[i : i + 1]) for i in range(T)]
    torch.testing.assert_close(losses.double(), torch.stack(each).detach(), rtol=2e-6, atol=2e-6)
    total = vocab_loss_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(losses.sum(), total.detach(), rtol=1e-6, atol=0)


class LargestLogits(TorchDispatchMode):
    """Notes the most elements that any tensor with a vocabulary axis had, weights [V, D] left out."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and V in tensor.shape and D not in tensor.shape:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", ["sum", "by token"])
def test_no_more_than_a_chunk_of_logits_exists(function: str, dtype: torch.dtype) -> None:
    hidden, weight, labels = draw(dtype)
    with LargestLogits() as seen:
        if function == "sum":
            with_gradients(chunked(8), hidden, weight, labels)
        else:
            token_losses(hidden, weight, labels, chunk_tokens=8)
    assert seen.elements == 8 * V
    with LargestLogits() as seen:
        with_gradients(vocab_loss_plain, hidden, weight, labels)
    assert seen.elements == T * V, "the detector sees whole logits where they are"


def test_a_gpu_sums_products_of_bf16_in_fp32() -> None:
    """Its logits are not rounded to bf16, nor what a chunk adds to the weight's gradient."""
    hidden, weight, labels = draw(torch.bfloat16)
    exact = with_gradients(by_definition, hidden, weight, labels)
    with gpu_products():
        got = with_gradients(chunked(8), hidden, weight, labels)
    rounded = with_gradients(chunked(8), hidden, weight, labels)
    assert float(got[0]) == pytest.approx(float(exact[0]), rel=1e-6)
    assert float(rounded[0]) != pytest.approx(float(exact[0]), rel=1e-5)
    for mine, truth in zip(got[1:], exact[1:], strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), truth.double(), rtol=2e-2, atol=2e-2)
