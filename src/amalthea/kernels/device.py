"""Which twin of a kernel runs: the processor's or the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_host_counts_as_gpu = False


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the processor's twin is to be used."""
    return tensor.is_cpu and not _host_counts_as_gpu


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the GPU's twin is to be used."""
    return tensor.is_cuda or (tensor.is_cpu and _host_counts_as_gpu)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside, tensors on the host count as being on a GPU: for planning, where tensors have shapes and no values."""
    global _host_counts_as_gpu
    before, _host_counts_as_gpu = _host_counts_as_gpu, True
    try:
        yield
    finally:
        _host_counts_as_gpu = before
