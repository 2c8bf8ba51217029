"""How many rows each dispatcher sends and receives, where it would read that from the device.

Shape legend: T tokens of a pass, K choices, E experts, N nodes, L ranks of a node, P ranks of the `ep` axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch

from amalthea.config.run import RunConfig
from amalthea.model.transformer import Transformer
from amalthea.parallel.all_to_all import ReadSplits, Splits
from amalthea.parallel.experts import AllToAllDispatcher
from amalthea.parallel.hierarchical import HierarchicalDispatcher
from amalthea.parallel.in_turn import chunk_sizes
from amalthea.plan.trace.recorder import Recorder
from amalthea.plan.trace.workload import Workload
from amalthea.plan.trace.world import wait_for_device


def inject_splits(
    recorder: Recorder, model: Transformer, config: RunConfig, workload: Workload, *, num_tokens: int, ep_rank: int
) -> None:
    """Tells every dispatcher what travels in a pass of `num_tokens`; all ranks choose experts alike."""
    moe = config.model.moe
    sizes = chunk_sizes(num_tokens, config.parallel.dispatch_chunks)
    loads = [workload.rows_by_expert(size, num_experts=moe.num_experts, top_k=moe.top_k) for size in sizes]
    for layer in model.moe_layers():
        dispatcher = layer.dispatcher
        if isinstance(dispatcher, AllToAllDispatcher):
            splits = [[flat_splits(rows, ep=config.parallel.ep, ep_rank=ep_rank) for rows in loads]]
        elif isinstance(dispatcher, HierarchicalDispatcher):
            chunks = [
                node_splits(
                    rows_by_node(
                        rows,
                        num_tokens=size,
                        num_nodes=dispatcher.num_nodes,
                        top_k=moe.top_k,
                        is_balanced=workload.expert_load is None,
                    ),
                    rows,
                    node_ranks=dispatcher.node_ranks,
                    ep_rank=ep_rank,
                )
                for size, rows in zip(sizes, loads, strict=True)
            ]
            # Across nodes all chunks are counted at once, inside a node one after the other.
            splits = [[across for across, _ in chunks], *([inside] for _, inside in chunks)]
        else:
            continue  # all experts are here
        dispatcher.read_splits = _reader(recorder, cycle(splits))


def _reader(recorder: Recorder, splits: Iterator[list[Splits]]) -> ReadSplits:
    def read(sums: torch.Tensor) -> list[Splits]:
        wait_for_device(recorder)
        return next(splits)

    return read


def flat_splits(rows: Sequence[int], *, ep: int, ep_rank: int) -> Splits:
    """Straight to the experts' ranks."""
    sent = _by_part(rows, ep)
    return [sent, [sent[ep_rank]] * ep]


def rows_by_node(rows: Sequence[int], *, num_tokens: int, num_nodes: int, top_k: int, is_balanced: bool) -> list[int]:
    """Tokens with any choice on each node, in expectation and rounded.

    Balanced, a token's choices are a sample without replacement; else experts count as chosen independently of each
    other, which is exact for one expert and near it for many.
    """
    num_experts, on_node = len(rows), len(rows) // num_nodes
    if is_balanced:
        missed = [math.comb(num_experts - on_node, top_k) / math.comb(num_experts, top_k)] * num_nodes
    else:
        chosen = [min(1.0, count / num_tokens) for count in rows]
        missed = [math.prod(1 - p for p in chosen[n * on_node : (n + 1) * on_node]) for n in range(num_nodes)]
    choices = _by_part(rows, num_nodes)
    return [min(round(num_tokens * (1 - m)), choice) for m, choice in zip(missed, choices, strict=True)]


def node_splits(tokens: Sequence[int], rows: Sequence[int], *, node_ranks: int, ep_rank: int) -> list[Splits]:
    """First along nodes, one row per token; then inside this rank's node, what came from all nodes, one per choice."""
    num_nodes = len(tokens)
    node, local = divmod(ep_rank, node_ranks)
    across = [list(tokens), [tokens[node]] * num_nodes]
    by_rank = _by_part(rows, num_nodes * node_ranks)[node * node_ranks : (node + 1) * node_ranks]
    inside = [num_nodes * count for count in by_rank]
    return [across, [inside, [inside[local]] * node_ranks]]


def _by_part(rows: Sequence[int], num_parts: int) -> list[int]:
    size = len(rows) // num_parts
    return [sum(rows[part * size : (part + 1) * size]) for part in range(num_parts)]
