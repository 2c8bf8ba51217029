"""Expert parallelism: each rank of the `ep` axis holds E / ep experts, and tokens travel to them.

Shape legend: T tokens of this rank, K choices, N = T·K rows, D hidden, E experts, P ranks on the axis, M rows received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from amalthea.kernels.permute import sort_by_expert, sum_to_tokens, to_rows
from amalthea.model.moe import Experts, Routing
from amalthea.model.transformer import Transformer


def apply_expert_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Shards every expert stack over the `ep` axis and sends tokens by all-to-all.

    The stacks become DTensors before FSDP sees them: plain local tensors would carry the same name on every rank,
    and a checkpoint would keep one rank's. The model must be on the meta device. `mesh` is the `ep` axis.
    """
    for moe in model.moe_layers():
        for name, parameter in list(moe.experts.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            moe.experts.register_parameter(name, nn.Parameter(sharded))
        moe.dispatcher = AllToAllDispatcher(moe.router.config.num_experts, group=mesh.get_group())


class AllToAllDispatcher:
    """Sends each row to the rank that holds its expert, and the result back.

    Communication, on the `ep` axis: counts (int64 [E], one all-to-all and one host sync), rows and weights out, rows
    back; the same again in backward without the counts. Memory: the received rows.
    """

    def __init__(self, num_experts: int, *, group: dist.ProcessGroup) -> None:
        self.num_experts = num_experts
        self.group = group
        self.read_splits: Callable[[torch.Tensor], list[list[int]]] = torch.Tensor.tolist
        """Brings the rows sent to and received from each rank, [2, P], to the host; plans replace it."""

    def __call__(self, x: torch.Tensor, routing: Routing, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        order, place, counts = sort_by_expert(routing.experts, self.num_experts)
        rows = to_rows(x, order=order, place=place)
        weights = to_rows(routing.weights.reshape(-1, 1), order=order, place=place)

        received, sent_splits, received_splits = self._exchange_counts(counts)
        rows = AllToAll.apply(rows, received_splits, sent_splits, self.group)
        weights = AllToAll.apply(weights, received_splits, sent_splits, self.group)
        rows = run_by_expert(rows, weights, received, experts)
        rows = AllToAll.apply(rows, sent_splits, received_splits, self.group)

        top_k = routing.experts.shape[1]
        return sum_to_tokens(rows, order=order, place=place, top_k=top_k), counts

    def _exchange_counts(self, counts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """Returns received counts [P, E / P], rows sent to and rows received from each rank."""
        num_ranks = dist.get_world_size(self.group)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        both = torch.stack((counts, received)).view(2, num_ranks, -1)
        # The uneven all-to-all takes its splits from the host: the one wait for the device in a layer.
        sent_splits, received_splits = self.read_splits(both.sum(dim=-1))
        return both[1], sent_splits, received_splits


def run_by_expert(rows: torch.Tensor, weights: torch.Tensor, received: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Runs received rows, which lie by (sender, expert), through their experts, and returns them in that order."""
    num_senders, num_local = received.shape
    expert = torch.arange(num_local, device=rows.device).repeat(num_senders)
    expert = torch.repeat_interleave(expert, received.flatten(), output_size=rows.shape[0])
    order, place, counts = sort_by_expert(expert[:, None], num_local)
    sorted_rows = to_rows(rows, order=order, place=place)
    sorted_weights = to_rows(weights, order=order, place=place)[:, 0]
    out = experts(sorted_rows, sorted_weights, counts.cumsum(0).to(torch.int32))
    return to_rows(out, order=place, place=order)


class AllToAll(torch.autograd.Function):
    """Uneven all-to-all of rows (`all_to_all`) whose gradient is the all-to-all back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, out_splits: list[int], in_splits: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (out_splits, in_splits), group
        return all_to_all(rows, out_splits, in_splits, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        out_splits, in_splits = ctx.splits
        return all_to_all(grads[0], in_splits, out_splits, ctx.group), None, None, None


def all_to_all(
    rows: torch.Tensor, out_splits: list[int], in_splits: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends `in_splits` rows to each rank and returns the `out_splits` rows that come from each."""
    out = rows.new_empty((sum(out_splits), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), out_splits, in_splits, group=group)
    return out
