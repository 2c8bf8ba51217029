"""Matrix products of bf16 whose sums stay in fp32 until they are used.

A CPU has no such product; a GPU forms it at the speed of bf16, where one of fp32 copies would be fifteen times as slow.
"""

from __future__ import annotations

import torch

from amalthea.kernels.device import on_gpu


def sums_in_fp32(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether `product_fp32` and `add_product_fp32` take these matrices here."""
    return on_gpu(left) and left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16)


def product_fp32(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """left · right in fp32: [M, K] and [K, N] → [M, N]. Memory: the result, unless `out` is given."""
    if out is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right, out_dtype=torch.float32, out=out)


def add_product_fp32(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Adds left · right to `total`, fp32 [M, N], in place and without a copy of the product."""
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
