"""The GPU's products of bf16 with fp32 results, for a CPU that has none: of fp32 copies, which multiply exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from amalthea.kernels.device import as_on_gpu


@contextmanager
def gpu_products() -> Iterator[None]:
    """Inside, tensors of a CPU count as on a GPU and torch multiplies them as there."""

    def mm(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return left.to(out_dtype) @ right.to(out_dtype)

    def mm_out(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype, *, out: torch.Tensor) -> torch.Tensor:
        return torch.mm(left.to(out_dtype), right.to(out_dtype), out=out)

    def addmm_out(
        total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype, *, out: torch.Tensor
    ) -> torch.Tensor:
        return torch.addmm(total, left.to(out_dtype), right.to(out_dtype), out=out)

    with torch.library._scoped_library("aten", "IMPL") as library, as_on_gpu():
        library.impl("mm.dtype", mm, "CPU")
        library.impl("mm.dtype_out", mm_out, "CPU")
        library.impl("addmm.dtype_out", addmm_out, "CPU")
        yield
