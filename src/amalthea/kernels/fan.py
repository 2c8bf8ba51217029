"""Copies of tokens for a varying number of destinations, and their sum.

A *slot* is one (token, choice) pair; a slot whose key is `num_keys` goes nowhere. Rows lie in order of keys, and of
tokens within a key. `source[m]` is the token of row m; `place[t, k]` is the row of slot (t, k), or M for a slot that
goes nowhere. Both directions read by index, and each is the other's gradient: nothing is accumulated by atomics.

Shape legend: T tokens, K choices per token, M rows, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Fan(NamedTuple):
    """`source` int64 [M], `place` int64 [T, K]."""

    source: torch.Tensor
    place: torch.Tensor

    @property
    def by_slot(self) -> Fan:
        """The same rows, of values [T · K, …] that every slot has for itself."""
        slots = torch.empty(self.source.numel() + 1, dtype=torch.int64, device=self.source.device)
        slots[self.place.flatten()] = torch.arange(self.place.numel(), device=self.source.device)
        return Fan(slots[:-1], self.place.view(-1, 1))


def sort_slots(keys: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order of slots by key, int64 [T · K], and rows of each key, int64 [num_keys]. keys int64 [T, K]. No wait."""
    flat = keys.flatten()
    counts = torch.zeros(num_keys + 1, dtype=torch.int64, device=keys.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return torch.argsort(flat, stable=True), counts[:num_keys]


def fan_of(order: torch.Tensor, num_rows: int, num_choices: int) -> Fan:
    """The first `num_rows` slots of an order of T tokens with K = `num_choices` slots each."""
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return Fan(order[:num_rows] // num_choices, place.clamp_(max=num_rows).view(-1, num_choices))


def fan_out(tokens: torch.Tensor, fan: Fan) -> torch.Tensor:
    """[T, D] → [M, D]."""
    return _FanOut.apply(tokens, fan)  # type: ignore[no-any-return]


def fan_in(rows: torch.Tensor, fan: Fan) -> torch.Tensor:
    """Sums each token's rows: [M, D] → [T, D]."""
    return _FanIn.apply(rows, fan)  # type: ignore[no-any-return]


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, fan: Fan) -> torch.Tensor:
        ctx.fan = fan
        return tokens.index_select(0, fan.source)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grads[0], ctx.fan), None


class _FanIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, fan: Fan) -> torch.Tensor:
        ctx.fan = fan
        return _sum(rows, fan)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.fan.source), None


def _sum(rows: torch.Tensor, fan: Fan) -> torch.Tensor:
    """One choice after the other, so that no [T, K, D] is made."""
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    total = padded.index_select(0, fan.place[:, 0])
    for column in fan.place.unbind(1)[1:]:
        total += padded.index_select(0, column)
    return total
