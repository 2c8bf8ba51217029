"""Copies of tokens for a varying number of destinations, and their sum.

A *slot* is one (token, choice) pair, as in `kernels/permute.py`, but some go nowhere. Rows lie in order of keys, and of
tokens within a key. `slots[m]` is the slot of row m and `source[m]` its token; `place[t, k]` is the row of slot (t, k),
or M for a slot that goes nowhere. Both directions read by index, and each is the other's gradient: nothing is
accumulated by atomics.

Shape legend: T tokens, K choices per token, M rows, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from amalthea.kernels.device import on_host
from amalthea.kernels.saved import Held


class Fan(NamedTuple):
    """`slots` and `source` int64 [M], `place` int64 [T, K]."""

    slots: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor

    @property
    def by_slot(self) -> Fan:
        """The same rows, of values [T · K, …] that every slot has for itself."""
        return Fan(self.slots, self.slots, self.place.view(-1, 1))


def fan_of(order: torch.Tensor, place: torch.Tensor, num_rows: int, num_choices: int) -> Fan:
    """The first `num_rows` slots of T tokens with K = `num_choices` slots each.

    `order` and `place` are `sort_by_expert`'s, int64 [T · K], for one key more: the last, of slots that go nowhere.
    """
    slots = order[:num_rows]
    return Fan(slots, slots // num_choices, place.clamp(max=num_rows).view(-1, num_choices))


def fan_out(tokens: torch.Tensor, fan: Fan) -> torch.Tensor:
    """[T, D] → [M, D]."""
    return _FanOut.apply(tokens, fan.source, fan.place)  # type: ignore[no-any-return]


def fan_in(rows: torch.Tensor, fan: Fan, *, held: Held | None = None) -> torch.Tensor:
    """Sums each token's rows: [M, D] → [T, D]. `held` is what holds `fan.source`, by choice; else it is saved here."""
    return _FanIn.apply(rows, fan.source, fan.place, held)  # type: ignore[no-any-return]


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        return tokens.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _sum(grads[0], place), None, None


class _FanIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, source: torch.Tensor, place: torch.Tensor, held: Held | None
    ) -> torch.Tensor:
        ctx.held = held
        if held is None:
            ctx.save_for_backward(source)
        return _sum(rows, place)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (source,) = ctx.saved_tensors if ctx.held is None else ctx.held.tensors()
        return grads[0].index_select(0, source), None, None, None


def _sum(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Reads each row once and sums in fp32; a CPU's bag of bf16 is slow, so there one choice follows the other."""
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    first, *others = place.unbind(1)
    if others and (rows.dtype == torch.float32 or not on_host(rows)):
        return F.embedding_bag(place, padded, mode="sum", padding_idx=len(rows))
    total = padded.index_select(0, first)
    for column in others:
        total += padded.index_select(0, column)
    return total
