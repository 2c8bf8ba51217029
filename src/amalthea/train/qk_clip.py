"""QK-clip: attention logits that grow past a bound are taken back by scaling query and key weights.

A head whose largest logit of the step was m > τ has its product scaled by γ = τ / m. Keys are shared by the query
heads of a group, so a key head takes √(smallest γ of its group), and each query head the rest of its own γ: every
head's logits shrink by exactly its γ. Source: Kimi K2 (arXiv 2507.20534), section 2.1; the split over groups is ours.

Shape legend: L layers, H query heads, G key heads, d head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from amalthea.parallel.shards import local_part
from amalthea.train.build import Run


class Clip(NamedTuple):
    """`factors` γ fp32 [L, H] of every head; `figures` fp64 [2]: the largest logit and how many heads are clipped."""

    factors: torch.Tensor
    figures: torch.Tensor


@torch.no_grad()
def attention_clip(run: Run, max_logits: torch.Tensor) -> Clip | None:
    """What is to be clipped, from the largest logits fp32 [L, H] of this rank's tokens; none without QK-clip.

    Communication: one all-reduce (maximum) over all ranks. Does not wait for the device.
    """
    threshold = run.config.optim.qk_clip
    if threshold is None:
        return None
    dist.all_reduce(max_logits, op=dist.ReduceOp.MAX)
    factors = (threshold / max_logits.clamp(min=1e-12)).clamp(max=1.0)
    return Clip(factors, torch.stack((max_logits.max(), (factors < 1).sum())).double())


@torch.no_grad()
def clip_attention(run: Run, factors: torch.Tensor) -> None:
    """Scales query and key weights in place, each rank its own part. Communication: none."""
    by_name: dict[str, torch.Tensor] = {}
    for index, factor in enumerate(factors):
        groups = factor.view(run.config.model.num_kv_heads, -1)
        key_factor = groups.amin(dim=1).sqrt()
        query_factor = (groups / key_factor[:, None]).flatten()
        by_name[f"blocks.{index}.attn.wq.weight"] = query_factor
        by_name[f"blocks.{index}.attn.wk.weight"] = key_factor
    for name, local in run.optimizers.each_weight(list(by_name)):
        _scale_heads(name, run.optimizers.parameters[name], local, by_name[name], run.config.model.head_dim)


def _scale_heads(
    name: str, weight: torch.nn.Parameter, local: torch.Tensor, factors: torch.Tensor, head_dim: int
) -> None:
    """Multiplies each head's rows by its factor: weight [heads · d, D], `local` this rank's rows, factors [heads]."""
    offsets = local_part(name, weight).offsets
    rows = factors.repeat_interleave(head_dim, output_size=weight.shape[0])
    local.mul_(rows[offsets[0] : offsets[0] + local.shape[0], None].to(local.dtype))
