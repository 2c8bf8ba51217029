"""Saving for backward earlier than the functions that need it run.

Recompute runs a block again until it has whatever the block had saved. What a block's last functions save by themselves
keeps it running to its end: through the experts' last product, the way back of their results and its all-to-all, for
whose results nobody asks any more. So all that these need is *held* at once, before them, and they save nothing: in
backward, where they come first, they ask the node that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

_results_count = True
_another_follows = False


class Held:
    """What `hold` saved; to be asked in backward. Indices of a slice count as in the whole."""

    def __init__(self, node: Any, where: slice = slice(None)) -> None:
        self._node, self._where = node, where

    def __getitem__(self, where: slice) -> Held:
        assert self._where == slice(None), "a part of a part"
        return Held(self._node, where)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """They are unpacked once for all who ask, as recompute demands."""
        if self._node.at_hand is None:
            self._node.at_hand = self._node.saved_tensors
        return self._node.at_hand[self._where]  # type: ignore[no-any-return]


def hold(
    used: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()
) -> tuple[tuple[torch.Tensor, ...], Held | None]:
    """Saves `used` and then `others` now. Returns `used` to go on with, and what to ask in backward.

    Whoever asks must work on `used` as returned, so that its backward comes before this one. Nothing is held, and none
    returned, where no gradient is wanted. Memory: nothing that would not be saved anyway.
    """
    through = _Hold.apply(len(used), *used, *others)
    node = through[0].grad_fn
    return through, None if node is None else Held(node)


def held_linear(x: torch.Tensor, weight: torch.Tensor, held: Held | None) -> torch.Tensor:
    """`F.linear` for x [T, I] and weight [O, I], which `held` holds in this order; saves nothing itself."""
    return F.linear(x, weight) if held is None else _HeldLinear.apply(x, weight, held)  # type: ignore[no-any-return]


def results_count() -> bool:
    """Whether the results of what runs now may be wanted in backward."""
    return _results_count


@contextmanager
def last_of_block() -> Iterator[None]:
    """Inside, backward wants no results of operations, unless another block of the same region needs them to run."""
    global _results_count
    before, _results_count = _results_count, _another_follows
    try:
        yield
    finally:
        _results_count = before


@contextmanager
def another_follows() -> Iterator[None]:
    """Inside, a block runs whose output the next one takes when both run again."""
    global _another_follows
    before, _another_follows = _another_follows, True
    try:
        yield
    finally:
        _another_follows = before


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_used: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.at_hand, ctx.num_others = None, len(tensors) - num_used
        return tuple(tensor.view_as(tensor) for tensor in tensors[:num_used])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.at_hand = None
        return (None, *grads, *(None,) * ctx.num_others)


class _HeldLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, held: Held) -> torch.Tensor:
        ctx.held = held
        with last_of_block():
            return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.held.tensors()
        (grad,) = grads
        needs_x, needs_weight, _ = ctx.needs_input_grad
        return grad.mm(weight) if needs_x else None, grad.t().mm(x) if needs_weight else None, None
