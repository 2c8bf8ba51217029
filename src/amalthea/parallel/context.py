"""Context parallelism: the ranks of the `cp` axis share sequences, each holding a run of positions.

Everything but attention works on positions alone. Attention needs all earlier ones, but treats heads apart: before
it, ranks exchange positions for heads, so that each holds whole sequences of a share of the heads, and after it they
exchange back. What each head computes is then exactly what one rank would compute, whatever the documents.

Shape legend: B sequences, S tokens per sequence, P ranks on the axis, H query heads, G key/value heads, d head dim.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from amalthea.model.transformer import Transformer
from amalthea.parallel.all_to_all import AllToAll


def apply_context_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Gives every layer the exchanges that it needs; `mesh` is the `cp` axis. The model takes S / P positions."""
    exchange = HeadExchange(mesh.get_group())
    for block in model.blocks:
        block.attn.exchange = exchange
    for moe in model.moe_layers():
        moe.router.sequence_sum = exchange.sum


class HeadExchange:
    """Positions for heads, and back.

    Communication, over `group`: one all-to-all to heads (queries, keys and values together) and one back; the same
    again in backward. Memory: what is sent and what is received. Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks, self.rank = group.size(), group.rank()

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, S/P, H, d], [B, S/P, G, d] twice → [B, S, H/P, d], [B, S, G/P, d] twice.

        Fewer key/value heads than ranks are repeated first: each rank needs the one that its queries share.
        """
        repeats = max(1, self.num_ranks // key.shape[2])
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
        sizes = [tensor.shape[2] // self.num_ranks for tensor in (query, key, value)]
        # [P, B, S/P, heads, d]: the heads of one rank lie together.
        parts = [tensor.unflatten(2, (self.num_ranks, -1)).movedim(2, 0) for tensor in (query, key, value)]
        received = self._exchange(torch.cat(parts, dim=3))
        query, key, value = received.movedim(0, 1).flatten(1, 2).split(sizes, dim=2)
        return query, key, value

    def to_positions(self, attended: torch.Tensor) -> torch.Tensor:
        """[B, S, H/P, d] → [B, S/P, H, d]."""
        parts = attended.unflatten(1, (self.num_ranks, -1)).movedim(1, 0)
        return self._exchange(parts).movedim(0, 2).flatten(2, 3)

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """parts [P, …], one for each rank, to those ranks."""
        one_each = [1] * self.num_ranks
        return AllToAll.apply(parts, one_each, one_each, self.group)

    def all_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Values of this rank's heads [H/P] among those of all [H]; −∞ for the heads of others."""
        whole = values.new_full((self.num_ranks, values.shape[0]), -torch.inf)
        whole[self.rank] = values
        return whole.flatten()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over the ranks that share a sequence. No gradient. Communication: one all-reduce."""
        total = values.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total
