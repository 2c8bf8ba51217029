"""Breadth first: bytes gathered for each token fall as 1 / k."""

from __future__ import annotations

import pytest
from support.collectives import Collectives
from support.ranks import run_ranks
from support.tiny import SEQ_LEN, microbatches, tiny_config

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.world import World
from amalthea.train.build import build
from amalthea.train.step import train_step

PER_RANK = 4


def gathers(world: World, config: RunConfig) -> tuple[int, int]:
    """All-gathers of a step, and the bytes that left this rank by them."""
    run = build(config, resolve(config, world_size=world.size), world)
    with Collectives() as collectives:
        train_step(run, microbatches(run, 0), lr_factor=1.0, tallies=())
    sizes = [s for n, s in zip(collectives.names, collectives._bytes, strict=True) if n == "_allgather_base_"]
    return len(sizes), sum(size or 0 for size in sizes)


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_gathered_bytes_per_token_fall_as_one_over_k(recompute: str) -> None:
    counts, sizes = {}, {}
    for passes in (1, 2, 4):
        config = tiny_config(
            train__microbatch_sequences=1,
            train__global_batch_tokens=2 * PER_RANK * SEQ_LEN,
            memory__sequences_per_gather=passes,
            memory__recompute=recompute,
        )
        counts[passes], sizes[passes] = run_ranks(2, gathers, config)[0]
    assert sizes[1] > 0
    # The root keeps its norm from the first microbatch on: it is gathered once, whatever the passes.
    once = 2 * sizes[2] - sizes[1]
    assert 0 <= once < 0.01 * sizes[1]
    assert sizes[4] == (sizes[1] - once) // 4 + once
