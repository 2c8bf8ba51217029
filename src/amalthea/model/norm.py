"""The norm of every layer."""

from __future__ import annotations

import torch
from torch import nn

from amalthea.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with a learned scale per feature."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, eps=self.eps)
