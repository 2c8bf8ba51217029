"""Tokens travel to their experts' rows and back; gradients are those of index_add.

Shape legend: T tokens, K choices per token, N = T·K rows, D hidden, E experts.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amalthea.kernels.device import as_on_gpu
from amalthea.kernels.permute import sort_by_expert, sum_to_tokens, to_rows, to_rows_twice

HIDDEN = 5
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def draw_experts(tokens: int, top_k: int, experts: int, seed: int) -> torch.Tensor:
    return torch.randint(experts, (tokens, top_k), generator=torch.Generator().manual_seed(seed))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def index_add(rows: torch.Tensor, order: torch.Tensor, tokens: int, top_k: int) -> torch.Tensor:
    """[N, D] → [T, D] in float64: each row added to its token."""
    return torch.zeros(tokens, rows.shape[1], dtype=torch.float64).index_add(0, order // top_k, rows.double())


sizes = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))


@given(size=sizes)
@settings(max_examples=50, deadline=None)
def test_slots_are_sorted_by_expert_and_tokens_stay_in_order(size: tuple[int, int, int, int]) -> None:
    tokens, top_k, num_experts, seed = size
    experts = draw_experts(tokens, top_k, num_experts, seed)
    order, place, counts = sort_by_expert(experts, num_experts)
    assert order.tolist() == sorted(range(tokens * top_k), key=lambda slot: int(experts.flatten()[slot]))
    assert place[order].tolist() == list(range(tokens * top_k))
    assert counts.tolist() == torch.bincount(experts.flatten(), minlength=num_experts).tolist()
    assert {order.dtype, place.dtype, counts.dtype} == {torch.int64}


@given(size=sizes, dtype=st.sampled_from(DTYPES))
@example(size=(1, 1, 1, 0), dtype=torch.float32)
@settings(max_examples=50, deadline=None)
def test_there_and_back_is_each_token_times_its_choices(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tokens, top_k, num_experts, seed = size
    order, place, _ = sort_by_expert(draw_experts(*size), num_experts)
    x = draw(tokens, HIDDEN, dtype=dtype, seed=seed)
    rows = to_rows(x, order=order, place=place)
    assert torch.equal(rows, x[order // top_k])
    back = sum_to_tokens(rows, order=order, place=place, top_k=top_k)
    assert back.dtype == dtype
    torch.testing.assert_close(back, x * top_k)


@given(size=sizes, dtype=st.sampled_from(DTYPES))
@settings(max_examples=50, deadline=None)
def test_gradients_equal_those_of_index_add(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tokens, top_k, num_experts, seed = size
    order, place, _ = sort_by_expert(draw_experts(*size), num_experts)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6

    x, upstream = draw(tokens, HIDDEN, dtype=dtype, seed=seed), draw(tokens * top_k, HIDDEN, dtype=dtype, seed=1)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(to_rows(leaf, order=order, place=place), leaf, upstream)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), index_add(upstream, order, tokens, top_k), rtol=tolerance, atol=tolerance)

    rows = upstream.clone().requires_grad_()
    out = sum_to_tokens(rows, order=order, place=place, top_k=top_k)
    torch.testing.assert_close(out.double(), index_add(upstream, order, tokens, top_k), rtol=tolerance, atol=tolerance)
    (grad,) = torch.autograd.grad(out, rows, x)
    assert torch.equal(grad, x[order // top_k])


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_for_two_uses_are_those_of_one(dtype: torch.dtype, top_k: int) -> None:
    order, place, _ = sort_by_expert(draw_experts(6, top_k, 4, 0), 4)
    x = draw(6, HIDDEN, dtype=dtype).requires_grad_()
    first, second = (draw(6 * top_k, HIDDEN, dtype=dtype, seed=seed) for seed in (1, 2))
    once = to_rows(x, order=order, place=place)
    (expected,) = torch.autograd.grad((once, once), x, (first, second))
    for device in (nullcontext, as_on_gpu):
        # The formula as it reads; `test_fused.py` compiles it.
        with torch.compiler.set_stance("force_eager"), device():
            twice = to_rows_twice(x, order=order, place=place)
            (found,) = torch.autograd.grad(twice, x, (first, second))
        assert torch.equal(twice[0], once)
        assert torch.equal(twice[1], once)
        torch.testing.assert_close(found, expected)


def test_gradcheck_in_float64() -> None:
    order, place, _ = sort_by_expert(draw_experts(4, 2, 3, 0), 3)
    x, rows = (draw(n, 3, dtype=torch.float64).requires_grad_() for n in (4, 8))
    assert torch.autograd.gradcheck(lambda t: to_rows(t, order=order, place=place), x)
    assert torch.autograd.gradcheck(lambda t: sum_to_tokens(t, order=order, place=place, top_k=2), rows)


def test_the_sum_repeats_bit_for_bit_and_reads_expanded_gradients() -> None:
    order, place, _ = sort_by_expert(draw_experts(64, 4, 8, 0), 8)
    x = draw(64, HIDDEN).requires_grad_()
    (first,) = torch.autograd.grad(to_rows(x, order=order, place=place), x, draw(256, HIDDEN))
    (second,) = torch.autograd.grad(to_rows(x, order=order, place=place), x, draw(256, HIDDEN))
    assert torch.equal(first, second)
    (ones,) = torch.autograd.grad(to_rows(x, order=order, place=place).sum(), x)
    assert torch.equal(ones, torch.full_like(x, 4.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens_at_all(dtype: torch.dtype) -> None:
    """What a rank of expert parallelism does when no token comes to it."""
    order, place, counts = sort_by_expert(torch.empty(0, 1, dtype=torch.int64), 3)
    assert counts.tolist() == [0, 0, 0]
    x = torch.empty(0, HIDDEN, dtype=dtype, requires_grad=True)
    rows = to_rows(x, order=order, place=place)
    out = sum_to_tokens(rows, order=order, place=place, top_k=1)
    assert rows.shape == out.shape == (0, HIDDEN)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.shape == (0, HIDDEN)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_sums_rows_as_the_processor_does(dtype: torch.dtype, top_k: int) -> None:
    order, place, _ = sort_by_expert(draw_experts(7, top_k, 4, 0), 4)
    rows = draw(7 * top_k, HIDDEN, dtype=dtype)
    with as_on_gpu():
        found = sum_to_tokens(rows, order=order, place=place, top_k=top_k)
    expected = index_add(rows, order, 7, top_k)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found, sum_to_tokens(rows, order=order, place=place, top_k=top_k))
