"""Copies for a varying number of destinations: against loops over tokens, and each as the other's gradient."""

from __future__ import annotations

import pytest
import torch

from amalthea.kernels.device import as_on_gpu
from amalthea.kernels.fan import Fan, fan_in, fan_of, fan_out
from amalthea.kernels.permute import sort_by_expert

TOKENS, CHOICES, KEYS, WIDTH = 9, 3, 4, 5
NOWHERE = KEYS


def made() -> tuple[Fan, torch.Tensor]:
    """A fan in which some slots go nowhere, of some tokens all; and the keys [T, K]."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(KEYS + 1, (TOKENS, CHOICES), generator=generator)
    keys[4] = NOWHERE
    order, place, counts = sort_by_expert(keys, KEYS + 1)
    return fan_of(order, place, int(counts[:-1].sum()), CHOICES), keys


def by_loops(keys: torch.Tensor) -> list[int]:
    """The token of each row."""
    return [t for key in range(KEYS) for t in range(TOKENS) for k in range(CHOICES) if keys[t, k] == key]


def test_each_token_is_copied_to_where_it_goes() -> None:
    fan, keys = made()
    tokens = torch.randn(TOKENS, WIDTH)
    assert torch.equal(fan_out(tokens, fan), tokens[by_loops(keys)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gpu", [False, True])
def test_rows_are_summed_by_token(dtype: torch.dtype, gpu: bool) -> None:
    fan, keys = made()
    rows = torch.randn(len(fan.slots), WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    for row, token in zip(rows.double(), by_loops(keys), strict=True):
        expected[token] += row
    if gpu:
        with as_on_gpu():
            found = fan_in(rows, fan)
    else:
        found = fan_in(rows, fan)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert not found[4].any()


def test_a_fan_of_slots_has_one_row_each() -> None:
    fan, _ = made()
    values = torch.randn(TOKENS * CHOICES, 1)
    rows = fan_out(values, fan.by_slot)
    assert torch.equal(rows, values[fan.slots])
    back = fan_in(rows, fan.by_slot)
    assert torch.equal(back[fan.slots], rows)


def test_gradients_are_exact() -> None:
    fan, _ = made()
    tokens = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: fan_out(x, fan), (tokens,))
    rows = torch.randn(len(fan.slots), WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: fan_in(x, fan), (rows,))
