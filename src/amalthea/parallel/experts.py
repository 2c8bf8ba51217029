"""Expert parallelism: each rank of the `ep` axis holds E / ep experts, and tokens travel to them.

Shape legend: T tokens of this rank, K choices, N = T·K rows, D hidden, E experts, P ranks on the axis, M rows received.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from amalthea.kernels.permute import sort_by_expert, sum_to_tokens, to_rows
from amalthea.model.moe import Experts, Routing
from amalthea.model.transformer import Transformer
from amalthea.parallel.all_to_all import AllToAll, ReadSplits, exchange_counts


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
        self.read_splits: ReadSplits = torch.Tensor.tolist
        """Plans, without values, replace it."""

    def __call__(self, x: torch.Tensor, routing: Routing, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        order, place, counts = sort_by_expert(routing.experts, self.num_experts)
        rows = to_rows(x, order=order, place=place)
        weights = to_rows(routing.weights.reshape(-1, 1), order=order, place=place)

        sent_splits, received_splits, received = exchange_counts(counts, self.group, self.read_splits)
        rows = AllToAll.apply(rows, received_splits, sent_splits, self.group)
        weights = AllToAll.apply(weights, received_splits, sent_splits, self.group)
        rows = run_by_expert(rows, weights, received, experts)
        rows = AllToAll.apply(rows, sent_splits, received_splits, self.group)

        top_k = routing.experts.shape[1]
        return sum_to_tokens(rows, order=order, place=place, top_k=top_k), counts


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
