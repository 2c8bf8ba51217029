"""Expert parallelism: each rank of the `ep` axis holds E / ep experts, and tokens travel to them.

A pass's tokens go in chunks, so that one chunk travels while another is computed; the shared experts are computed while
the first ones travel.

Shape legend: T tokens of this rank, K choices, N = T·K rows, D hidden, E experts, P ranks on the axis, C chunks, M rows
received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from amalthea.kernels.permute import sort_by_expert, sum_to_tokens, to_rows, to_rows_twice
from amalthea.kernels.saved import Held, last_of_block
from amalthea.model.moe import Experts, Inner, Routing, SharedExperts
from amalthea.model.transformer import Transformer
from amalthea.parallel.all_to_all import ReadSplits, Splits, Trip, exchange_counts
from amalthea.parallel.in_turn import Travel, cut, travel_with


def apply_expert_parallel(model: Transformer, mesh: DeviceMesh, *, num_chunks: int = 1) -> None:
    """Shards every expert stack over the `ep` axis and sends tokens by all-to-all.

    The stacks become DTensors before FSDP sees them: plain local tensors would carry the same name on every rank,
    and a checkpoint would keep one rank's. The model must be on the meta device. `mesh` is the `ep` axis.
    """
    for moe in model.moe_layers():
        for name, parameter in list(moe.experts.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            moe.experts.register_parameter(name, nn.Parameter(sharded))
        moe.dispatcher = AllToAllDispatcher(
            moe.router.config.num_experts, group=mesh.get_group(), num_chunks=num_chunks
        )


@dataclass(frozen=True)
class Sorting:
    """Rows of a chunk by expert, as `sort_by_expert` returns them, and how many go to each rank and come from it."""

    order: torch.Tensor
    place: torch.Tensor
    splits: Splits
    received: torch.Tensor
    """Rows from each rank for each expert here, [P, E / P]."""


def sort_chunks(
    keys: Sequence[torch.Tensor], num_keys: int, group: dist.ProcessGroup, read_splits: ReadSplits
) -> tuple[list[Sorting], torch.Tensor]:
    """Sorts the slots of each chunk by key, int64 [T, K], where `num_keys` stands for a slot that goes nowhere.

    Returns the sortings, and the rows of each key, int64 [C, keys]. Communication: `exchange_counts`.
    """
    found = [sort_by_expert(key, num_keys + 1) for key in keys]
    counts = torch.stack([rows[:-1] for *_, rows in found])
    splits, received = exchange_counts(counts, group, read_splits)
    sortings = [
        Sorting(order, place, sent, came) for (order, place, _), sent, came in zip(found, splits, received, strict=True)
    ]
    return sortings, counts


class AllToAllDispatcher:
    """Sends each row to the rank that holds its expert, and the result back.

    Communication, on the `ep` axis: counts (int64 [C, E], one all-to-all and one host sync), then for each chunk rows
    and weights out, rows back; the same again in backward without the counts. What travels does so beside the
    computation of other chunks and of the shared experts. Memory: the received rows.
    """

    def __init__(self, num_experts: int, *, group: dist.ProcessGroup, num_chunks: int = 1) -> None:
        self.num_experts, self.group, self.num_chunks = num_experts, group, num_chunks
        self.read_splits: ReadSplits = torch.Tensor.tolist
        """Plans, without values, replace it."""

    def __call__(
        self, x: torch.Tensor, routing: Routing, experts: Experts, shared: SharedExperts | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = cut(x, routing, self.num_chunks)
        chosen = [experts_of for _, experts_of, _ in chunks]
        sortings, counts = sort_chunks(chosen, self.num_experts, self.group, self.read_splits)
        travels = [
            self._travel(tokens, weights, sorting, experts)
            for (tokens, _, weights), sorting in zip(chunks, sortings, strict=True)
        ]
        return travel_with(travels, x, shared), counts.sum(dim=0)

    def _travel(
        self, x: torch.Tensor, weights: torch.Tensor, sorting: Sorting, experts: Experts
    ) -> Travel[torch.Tensor]:
        """One chunk, tokens [T, D] and weights [T, K], there and back."""
        order, place, (sent, received) = sorting.order, sorting.place, sorting.splits
        there = [Trip(self.group, sent, received) for _ in range(2)]
        tensors = (x, weights.reshape(-1, 1))
        buffers = [trip.depart(to_rows(t, order=order, place=place)) for trip, t in zip(there, tensors, strict=True)]
        yield False
        arrived = [trip.arrive(buffer) for trip, buffer in zip(there, buffers, strict=True)]
        del buffers, tensors
        visit = Visit(arrived, sorting.received, experts, also=(order,))
        yield False
        back = Trip(self.group, received, sent)
        with last_of_block():
            buffer = back.depart(visit.results())
        yield True
        rows = back.arrive(buffer)
        return sum_to_tokens(rows, order=order, place=place, top_k=weights.shape[1], held=visit.also(0, 1))


class Visit:
    """Received rows [M, D] and weights [M, 1], which lie by (sender, expert), at their experts.

    Everything but the last product is done at once; `also` is held with what the rest needs in backward. They are taken
    out of the list `arrived`, so that nobody holds rows that have been sorted.
    """

    def __init__(
        self,
        arrived: list[torch.Tensor],
        received: torch.Tensor,
        experts: Experts,
        *,
        also: Sequence[torch.Tensor] = (),
    ) -> None:
        weights, rows = arrived.pop(), arrived.pop()
        num_senders, num_local = received.shape
        expert = torch.arange(num_local, device=rows.device).repeat(num_senders)
        expert = torch.repeat_interleave(expert, received.flatten(), output_size=rows.shape[0])
        self._order, self._place, counts = sort_by_expert(expert[:, None], num_local)
        sorted_rows = to_rows_twice(rows, order=self._order, place=self._place, fuse=experts.fuse)
        sorted_weights = to_rows(weights, order=self._order, place=self._place)[:, 0]
        del rows, weights
        ends = counts.cumsum(0).to(torch.int32)
        self._inner: Inner | None = experts.inner(sorted_rows, sorted_weights, ends, also=(self._order, *also))
        self._held = self._inner.also

    def results(self) -> torch.Tensor:
        """The last product's, in the order in which rows came; once."""
        inner, self._inner = self._inner, None
        assert inner is not None, "results are taken once"
        held = self._held(0, 1)
        return sum_to_tokens(inner.down(), order=self._order, place=self._place, top_k=1, held=held)

    def also(self, start: int, stop: int) -> Held | None:
        """What holds a part of `also`."""
        return self._held(1 + start, 1 + stop)
