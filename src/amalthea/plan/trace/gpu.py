"""Code that chooses by device, made to choose as on a GPU while its tensors are fake ones on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from amalthea.core.scratch import Scratch
from amalthea.kernels.device import as_on_gpu
from amalthea.optim import dist_muon
from amalthea.plan.trace.recorder import Recorder


@contextmanager
def gpu_code(recorder: Recorder) -> Iterator[None]:
    """Inside: the GPU's twins of kernels, fresh scratch buffers, and the optimizer's batches for a GPU."""

    def take(scratch: Scratch, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=scratch.device)

    def whole(*lists: Sequence[torch.Tensor]) -> Iterator[list[list[torch.Tensor]]]:
        if lists[0]:
            yield [list(tensors) for tensors in lists]

    def batch_elements(muon: Any, rows: int, columns: int) -> int:
        return dist_muon._BATCH_ELEMENTS_ELSEWHERE

    def rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        return _FusedRMSNorm.apply(x, weight, recorder)  # type: ignore[no-any-return]

    with ExitStack() as stack:
        stack.enter_context(as_on_gpu())
        for owner, name, replacement in (
            (Scratch, "take", take),
            (dist_muon, "_in_cache", whole),
            (dist_muon.DistMuon, "_batch_elements", batch_elements),
            (F, "rms_norm", rms_norm),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


class _FusedRMSNorm(torch.autograd.Function):
    """The GPU's one kernel each way, which a CPU composes of many: what it allocates, reads and writes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        out = torch.empty_like(x)
        inverse = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, inverse)
        ctx.recorder = recorder
        recorder.kernel("_fused_rms_norm", (x, weight, out, inverse))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        ctx.recorder.kernel("_fused_rms_norm_backward", (grads[0], x, weight, inverse, grad_x, grad_weight))
        return grad_x, grad_weight, None
