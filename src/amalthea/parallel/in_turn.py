"""Several chunks on their ways to other ranks and back, so that one travels while another is computed.

A *travel* is a generator: it yields whenever something of its own is under way, or when the others should come first,
and returns its result. Autograd runs what a later step made earlier, so backward takes turns the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import torch

from amalthea.model.moe import Routing

T = TypeVar("T")
R = TypeVar("R")
Travel = Generator[None, None, torch.Tensor]


def run_in_turn(travels: Sequence[Generator[None, None, R]], beside: Callable[[], T]) -> tuple[list[R], T]:
    """Advances all travels step by step, and calls `beside` once the first step of all is under way."""
    results: dict[int, R] = {}
    aside: list[T] = []
    while len(results) < len(travels):
        for number, travel in enumerate(travels):
            try:
                next(travel)
            except StopIteration as end:
                results[number] = end.value
        if not aside:
            aside.append(beside())
    return [results[number] for number in range(len(travels))], aside[0]


def chunk_sizes(num_tokens: int, num_chunks: int) -> list[int]:
    """Tokens of each chunk, as even as can be."""
    whole, rest = divmod(num_tokens, num_chunks)
    return [whole + (number < rest) for number in range(num_chunks)]


def cut(x: torch.Tensor, routing: Routing, num_chunks: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """x [T, D], experts and weights [T, K] of each chunk."""
    sizes = chunk_sizes(len(x), num_chunks)
    return list(zip(x.split(sizes), routing.experts.split(sizes), routing.weights.split(sizes), strict=True))


def join(chunks: Sequence[torch.Tensor], beside: torch.Tensor | None) -> torch.Tensor:
    """The chunks' results one after the other, and what was computed beside them added: [T, D]."""
    out = chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))
    return out if beside is None else out + beside
