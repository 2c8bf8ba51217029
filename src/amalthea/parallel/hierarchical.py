"""Node-aware dispatch: a token crosses to another node once, however many of its experts are there.

The ranks of the `ep` axis are `node` × `local`. A row goes first along `node`, to the rank with this rank's place on
each node that holds an expert of it, and fans out there along `local`. On the way back its results are summed on the
node first, so that again one row crosses.

Shape legend: T tokens of this rank, K choices, D hidden, E experts, N nodes, L ranks per node; F = E / N experts of a
node; A rows that arrive on a node, R rows for this rank's experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from amalthea.kernels.fan import fan_in, fan_of, fan_out
from amalthea.kernels.permute import count_slots, sort_by_expert
from amalthea.model.moe import Experts, Routing
from amalthea.model.transformer import Transformer
from amalthea.parallel.all_to_all import AllToAll, ReadSplits, all_to_all, exchange_counts
from amalthea.parallel.experts import run_by_expert


def apply_hierarchical_dispatch(model: Transformer, mesh: DeviceMesh) -> None:
    """Replaces the dispatchers of `apply_expert_parallel`; `mesh` has the axes `node` and `local` of `ep`."""
    for moe in model.moe_layers():
        moe.dispatcher = HierarchicalDispatcher(
            moe.router.config.num_experts, across=mesh.get_group("node"), inside=mesh.get_group("local")
        )


class HierarchicalDispatcher:
    """Rows to nodes, then to ranks, and back.

    Communication, `across` nodes: how many rows (one small all-to-all and one wait for the host), rows with the weights
    and expert numbers of all their choices, results. `inside` the node: the same, with one weight per row and no expert
    numbers. In backward rows and weights again. Memory: the rows received across nodes, and those inside.
    """

    def __init__(self, num_experts: int, *, across: dist.ProcessGroup, inside: dist.ProcessGroup) -> None:
        self.num_experts, self.across, self.inside = num_experts, across, inside
        self.num_nodes, self.node_ranks = across.size(), inside.size()
        self.node_experts = num_experts // self.num_nodes
        self.read_splits: ReadSplits = torch.Tensor.tolist
        """Plans, without values, replace it."""

    def __call__(self, x: torch.Tensor, routing: Routing, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        top_k = routing.experts.shape[1]
        keys = self._first_choice_of_each_node(routing.experts)
        order, place, rows_to_nodes = sort_by_expert(keys, self.num_nodes + 1)
        sent, received, _ = exchange_counts(rows_to_nodes[:-1], self.across, self.read_splits)
        fan = fan_of(order, place, sum(sent), top_k)
        node = keys.flatten().index_select(0, order[: sum(sent)])

        numbers = routing.experts.index_select(0, fan.source) - node[:, None] * self.node_experts
        is_there = (numbers >= 0) & (numbers < self.node_experts)
        weights = fan_out(routing.weights, fan) * is_there
        rows = AllToAll.apply(fan_out(x, fan), received, sent, self.across)
        weights = AllToAll.apply(weights, received, sent, self.across)
        numbers = all_to_all(numbers.where(is_there, self.node_experts), received, sent, self.across)
        rows = self._on_node(rows, weights, numbers, experts)
        rows = AllToAll.apply(rows, sent, received, self.across)

        return fan_in(rows, fan), count_slots(routing.experts, self.num_experts)

    def _first_choice_of_each_node(self, experts: torch.Tensor) -> torch.Tensor:
        """[T, K]: the node of each choice, or N where an earlier choice is on the same node."""
        node = experts // self.node_experts
        same = node[:, :, None] == node[:, None, :]
        return node.masked_fill(same.tril_(-1).any(dim=-1), self.num_nodes)

    def _on_node(
        self, rows: torch.Tensor, weights: torch.Tensor, numbers: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        """rows [A, D], weights and expert numbers [A, K], F where a choice is elsewhere → weighted sums [A, D]."""
        order, place, rows_to_experts = sort_by_expert(numbers, self.node_experts + 1)
        sent, received, received_counts = exchange_counts(rows_to_experts[:-1], self.inside, self.read_splits)
        fan = fan_of(order, place, sum(sent), numbers.shape[1])
        weight = fan_out(weights.reshape(-1, 1), fan.by_slot)
        rows = AllToAll.apply(fan_out(rows, fan), received, sent, self.inside)
        weight = AllToAll.apply(weight, received, sent, self.inside)
        rows = run_by_expert(rows, weight, received_counts, experts)
        return fan_in(AllToAll.apply(rows, sent, received, self.inside), fan)
