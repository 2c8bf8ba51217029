"""Work buffers that are used again and again."""

from __future__ import annotations

import math

import torch


class Scratch:
    """Buffers by name.

    On a CPU a buffer lives on from call to call, since fresh memory costs a page fault for every 4 KiB. Elsewhere
    each call gives a fresh one: the caching allocator spares that cost, and between steps the memory is the model's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """An uninitialized tensor, valid until the next call with this name; memory: the largest so far."""
        size = math.prod(shape)
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        kept = self._kept.get((name, dtype))
        if kept is None or kept.numel() < size:
            kept = self._kept[name, dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return kept[:size].view(shape)
