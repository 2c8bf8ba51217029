"""The largest attention logit of each head, which flash kernels do not tell.

Shape legend: B sequences, S tokens, H query heads, G key heads, d head dim, C queries in a chunk.
"""

from __future__ import annotations

import torch

from amalthea.kernels.attention import Documents


@torch.no_grad()
def max_logits(
    query: torch.Tensor, key: torch.Tensor, *, documents: Documents, chunk_elements: int = 1 << 24
) -> torch.Tensor:
    """Largest d^-1/2 · q·k over all pairs that attention sees, by query head: fp32 [H].

    Shapes: query [B, S, H, d]; key [B, S, G, d]. Costs the score half of an attention forward pass. Memory: at most
    `chunk_elements` scores at a time, or one row of them.
    """
    heads, kv_heads, scale = query.shape[2], key.shape[2], query.shape[3] ** -0.5
    best = query.new_full((heads,), float("-inf"), dtype=torch.float32)
    for q, k in zip(*(t.flatten(0, 1).split(documents.flat_lengths) for t in (query, key)), strict=True):
        length = len(q)
        chunk = max(1, chunk_elements // (heads * length))
        grouped_keys = k.transpose(0, 1)[:, None]  # [G, 1, length, d]
        for start in range(0, length, chunk):
            rows = q[start : start + chunk].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
            stop = start + rows.shape[2]
            scores = (rows @ grouped_keys[:, :, :stop].mT).float()
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(start + 1)
            scores.masked_fill_(hidden, float("-inf"))
            best = torch.maximum(best, scores.amax(dim=(2, 3)).flatten() * scale)
    return best
