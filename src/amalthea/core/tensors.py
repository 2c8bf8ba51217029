"""Small things about tensors that every layer needs."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By their names in the configuration."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing memory; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
