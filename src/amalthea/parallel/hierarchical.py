"""Node-aware dispatch: a token crosses to another node once, however many of its experts are there.

The ranks of the `ep` axis are `node` × `local`. A row goes first along `node`, to the rank with this rank's place on
each node that holds an expert of it, and fans out there along `local`. On the way back its results are summed on the
node first, so that again one row crosses.

Chunks take turns as in `parallel/experts.py`.

Shape legend: T tokens of this rank, K choices, D hidden, E experts, N nodes, L ranks per node, C chunks; F = E / N
experts of a node; A rows that arrive on a node, R rows for this rank's experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from amalthea.kernels.fan import Fan, fan_in, fan_of, fan_out
from amalthea.kernels.permute import count_slots
from amalthea.kernels.saved import last_of_block
from amalthea.model.moe import Experts, Routing, SharedExperts
from amalthea.model.transformer import Transformer
from amalthea.parallel.all_to_all import ReadSplits, Splits, Trip
from amalthea.parallel.experts import Sorting, Visit, sort_chunks
from amalthea.parallel.in_turn import Travel, cut, travel_with


def apply_hierarchical_dispatch(model: Transformer, mesh: DeviceMesh, *, num_chunks: int = 1) -> None:
    """Replaces the dispatchers of `apply_expert_parallel`; `mesh` has the axes `node` and `local` of `ep`."""
    for moe in model.moe_layers():
        moe.dispatcher = HierarchicalDispatcher(
            moe.router.config.num_experts,
            across=mesh.get_group("node"),
            inside=mesh.get_group("local"),
            num_chunks=num_chunks,
        )


class HierarchicalDispatcher:
    """Rows to nodes, then to ranks, and back.

    Communication, `across` nodes: how many rows (one small all-to-all and one wait for the host), then for each chunk
    rows with the weights and expert numbers of all their choices, results. `inside` the node: the same, with one weight
    per row, no expert numbers, and one wait for the host for each chunk. In backward rows and weights again. Memory:
    the rows received across nodes, and those inside.
    """

    def __init__(
        self, num_experts: int, *, across: dist.ProcessGroup, inside: dist.ProcessGroup, num_chunks: int = 1
    ) -> None:
        self.num_experts, self.across, self.inside, self.num_chunks = num_experts, across, inside, num_chunks
        self.num_nodes, self.node_ranks = across.size(), inside.size()
        self.node_experts = num_experts // self.num_nodes
        self.read_splits: ReadSplits = torch.Tensor.tolist
        """Plans, without values, replace it."""

    def __call__(
        self, x: torch.Tensor, routing: Routing, experts: Experts, shared: SharedExperts | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = cut(x, routing, self.num_chunks)
        keys = [self._first_choice_of_each_node(chosen) for _, chosen, _ in chunks]
        sortings, _ = sort_chunks(keys, self.num_nodes, self.across, self.read_splits)
        travels = [
            self._travel(*chunk, key, sorting, experts)
            for chunk, key, sorting in zip(chunks, keys, sortings, strict=True)
        ]
        return travel_with(travels, x, shared), count_slots(routing.experts, self.num_experts)

    def _first_choice_of_each_node(self, experts: torch.Tensor) -> torch.Tensor:
        """[T, K]: the node of each choice, or N where an earlier choice is on the same node."""
        node = experts // self.node_experts
        same = node[:, :, None] == node[:, None, :]
        return node.masked_fill(same.tril_(-1).any(dim=-1), self.num_nodes)

    def _travel(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        sorting: Sorting,
        experts: Experts,
    ) -> Travel[torch.Tensor]:
        """One chunk: tokens [T, D], choices, weights and nodes [T, K]."""
        sent, received = sorting.splits
        fan = fan_of(sorting.order, sorting.place, sum(sent), chosen.shape[1])
        node = keys.flatten().index_select(0, fan.slots)
        numbers = chosen.index_select(0, fan.source) - node[:, None] * self.node_experts
        is_there = (numbers >= 0) & (numbers < self.node_experts)
        tensors = (fan_out(x, fan), fan_out(weights, fan) * is_there, numbers.where(is_there, self.node_experts))
        across = [Trip(self.across, sent, received) for _ in tensors]
        buffers = [trip.depart(tensor) for trip, tensor in zip(across, tensors, strict=True)]
        del tensors
        yield False
        rows, node_weights, numbers = (trip.arrive(buffer) for trip, buffer in zip(across, buffers, strict=True))
        del buffers
        inside, fan_inside, from_ranks = self._sort_on_node(numbers)
        tensors = (fan_out(rows, fan_inside), fan_out(node_weights.reshape(-1, 1), fan_inside.by_slot))
        there = [Trip(self.inside, *inside) for _ in tensors]
        buffers = [trip.depart(tensor) for trip, tensor in zip(there, tensors, strict=True)]
        del rows, node_weights, tensors
        yield False
        arrived = [trip.arrive(buffer) for trip, buffer in zip(there, buffers, strict=True)]
        del buffers
        visit = Visit(arrived, from_ranks, experts, also=(fan.source, fan_inside.source))
        yield False
        back = Trip(self.inside, *reversed(inside))
        with last_of_block():
            buffer = back.depart(visit.results())
        yield False
        rows = fan_in(back.arrive(buffer), fan_inside, held=visit.also(1, 2))
        back = Trip(self.across, received, sent)
        with last_of_block():
            buffer = back.depart(rows)
        yield True
        return fan_in(back.arrive(buffer), fan, held=visit.also(0, 1))

    def _sort_on_node(self, numbers: torch.Tensor) -> tuple[Splits, Fan, torch.Tensor]:
        """Expert numbers [A, K], F where a choice is elsewhere → where rows go inside the node, and what comes."""
        (sorting,), _ = sort_chunks([numbers], self.node_experts, self.inside, self.read_splits)
        num_rows = sum(sorting.splits[0])
        return sorting.splits, fan_of(sorting.order, sorting.place, num_rows, numbers.shape[1]), sorting.received
