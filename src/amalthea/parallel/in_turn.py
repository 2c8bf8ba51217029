"""Several chunks on their ways to other ranks and back, so that one travels while another is computed.

A *travel* is a generator: it yields whenever something of its own is under way, or when the others should come first,
and returns its result. Autograd runs what a later step made earlier, so backward takes turns the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import torch

from amalthea.model.moe import Routing, SharedExperts

R = TypeVar("R")
Travel = Generator[bool, None, R]
"""Yields whether it is on the last leg of its way."""


def run_in_turn(
    travels: Sequence[Travel[R]],
    *,
    at_first: Callable[[], None] = lambda: None,
    at_last: Callable[[], None] = lambda: None,
) -> list[R]:
    """Advances all travels step by step, and returns their results.

    `at_first` is called once the first step of all is under way, `at_last` once all are on their last leg.
    """
    results: dict[int, R] = {}
    call_first = True
    while len(results) < len(travels):
        are_last = []
        for number, travel in enumerate(travels):
            try:
                are_last.append(next(travel))
            except StopIteration as end:
                results[number] = end.value
        if call_first:
            at_first()
        if are_last and all(are_last):
            at_last()
        call_first = False
    return [results[number] for number in range(len(travels))]


def chunk_sizes(num_tokens: int, num_chunks: int) -> list[int]:
    """Tokens of each chunk, as even as can be."""
    whole, rest = divmod(num_tokens, num_chunks)
    return [whole + (number < rest) for number in range(num_chunks)]


def cut(x: torch.Tensor, routing: Routing, num_chunks: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """x [T, D], experts and weights [T, K] of each chunk."""
    sizes = chunk_sizes(len(x), num_chunks)
    return list(zip(x.split(sizes), routing.experts.split(sizes), routing.weights.split(sizes), strict=True))


def travel_with(travels: Sequence[Travel[torch.Tensor]], x: torch.Tensor, shared: SharedExperts | None) -> torch.Tensor:
    """The chunks' results [T, D] one after the other, and added what the shared experts make of x [T, D] meanwhile.

    All but their last product is computed while the first rows travel, and that while the last ones do.
    """
    downs: list[Callable[[], torch.Tensor]] = []
    outs: list[torch.Tensor] = []
    if shared is None:
        done = run_in_turn(travels)
    else:
        done = run_in_turn(
            travels,
            at_first=lambda: downs.append(shared.inner(x)),
            at_last=lambda: outs.append(downs[0]()),
        )
    out = done[0] if len(done) == 1 else torch.cat(done)
    return out + outs[0] if outs else out
