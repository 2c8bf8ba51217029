"""Context parallelism: the ranks of the `cp` axis share sequences, each holding a run of positions.

Everything but attention works on positions alone. Attention needs all earlier ones, but treats heads apart: before
it, ranks exchange positions for heads, so that each holds whole sequences of a share of the heads, and after it they
exchange back. What each head computes is then exactly what one rank would compute, whatever the documents.

Shape legend: B sequences, S tokens per sequence, P ranks on the axis, H query heads, G key/value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from amalthea.kernels.attention import Documents
from amalthea.model.attention import Attend
from amalthea.model.transformer import Transformer
from amalthea.parallel.all_to_all import Trip
from amalthea.parallel.in_turn import Travel, run_in_turn


def apply_context_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Gives every layer the exchanges that it needs; `mesh` is the `cp` axis. The model takes S / P positions."""
    exchange = HeadExchange(mesh.get_group())
    for block in model.blocks:
        block.attn.exchange = exchange
    for moe in model.moe_layers():
        moe.router.sequence_sum = exchange.sum


class HeadExchange:
    """Positions for heads, and back.

    Sequences go one by one, or where there is one its heads in two halves, so that one part travels while another is
    attended to: the same numbers. Communication, over `group`: for each part one all-to-all to heads (queries, keys and
    values together) and one back; the same again in backward. Memory: what is sent and what is received. Source:
    DeepSpeed-Ulysses (arXiv 2309.14509).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks, self.rank = group.size(), group.rank()

    def around(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes: query [B, S/P, H, d], key and value [B, S/P, G, d] → [B, S/P, H, d] and the logits of all heads.

        `attend` gets [b, S, h, d] and [b, S, g, d] twice: of one sequence all h = H/P and g = G/P heads, or half of
        them. Fewer key/value heads than ranks are repeated first: each rank needs the one that its queries share.
        """
        repeats = max(1, self.num_ranks // key.shape[2])
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
        # [P, B, S/P, heads, d]: the heads of one rank lie together.
        whole = [tensor.unflatten(2, (self.num_ranks, -1)).movedim(2, 0) for tensor in (query, key, value)]
        by_sequence = len(query) > 1
        if by_sequence:
            parts = zip(*(tensor.split(1, dim=1) for tensor in whole), strict=True)
            of_parts = documents.split(1)
        else:
            halves = 1 if whole[1].shape[3] % 2 else 2
            parts = zip(*(tensor.chunk(halves, dim=3) for tensor in whole), strict=True)
            of_parts = (documents,) * halves
        done = run_in_turn([self._travel(*part, attend) for part in zip(parts, of_parts, strict=True)])
        # [B, S/P, P, heads, d]
        out = torch.cat([received.movedim(0, 2) for received, _ in done], dim=0 if by_sequence else 3)
        logits = [found for _, found in done]
        largest = torch.stack(logits).amax(dim=0) if by_sequence and logits[0].numel() else torch.cat(logits)
        return out.flatten(2, 3), self._all_heads(largest) if largest.numel() else largest

    def _travel(
        self, parts: Sequence[torch.Tensor], documents: Documents, attend: Attend
    ) -> Travel[tuple[torch.Tensor, torch.Tensor]]:
        """Queries, keys and values [P, b, S/P, heads, d] → [P, b, S/P, heads, d], and the logits of these heads."""
        there, back = self._trip(), self._trip()
        buffer = there.depart(torch.cat(list(parts), dim=3))
        yield False
        received = there.arrive(buffer)
        sizes = [part.shape[3] for part in parts]
        query, key, value = received.movedim(0, 1).flatten(1, 2).split(sizes, dim=2)
        attended, logits = attend(query, key, value, documents)
        buffer = back.depart(attended.unflatten(1, (self.num_ranks, -1)).movedim(1, 0))
        yield True
        return back.arrive(buffer), logits

    def _trip(self) -> Trip:
        one_each = [1] * self.num_ranks
        return Trip(self.group, one_each, one_each)

    def _all_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Values of this rank's heads [H/P] among those of all [H]; −∞ for the heads of others."""
        whole = values.new_full((self.num_ranks, values.shape[0]), -torch.inf)
        whole[self.rank] = values
        return whole.flatten()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over the ranks that share a sequence. No gradient. Communication: one all-reduce."""
        total = values.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total
