"""Matrix products over a stack of experts.

Shape legend: N rows (one per token and chosen expert, sorted by expert), E experts, I input, O output features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, *, ends: torch.Tensor) -> torch.Tensor:
    """Rows `ends[e-1] : ends[e]` times `weight[e]` transposed.

    Shapes: rows [N, I]; weight [E, O, I]; ends int32 [E], the running sum of rows per expert, last ≤ N. Returns
    [N, O]; rows past the last end are unspecified. I and O must be multiples of 16 bytes.
    """
    if rows.dtype in _GROUPED_MM_DTYPES and rows.shape[0]:
        return F.grouped_mm(rows, weight.transpose(-1, -2), offs=ends)
    return grouped_linear_plain(rows, weight, ends=ends)


def grouped_linear_plain(rows: torch.Tensor, weight: torch.Tensor, *, ends: torch.Tensor) -> torch.Tensor:
    """Twin of `grouped_linear`, a loop over experts; waits for the device."""
    stops = ends.tolist()
    parts = [
        F.linear(rows[start:stop], weight[expert])
        for expert, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))
    ]
    return torch.cat(parts)
