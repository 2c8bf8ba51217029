"""Orthogonalization by Newton-Schulz, for many matrices of one shape at a time.

Shape legend: M matrices, R rows, C columns.
"""

from __future__ import annotations

import torch

# An odd quintic a·x + b·x³ + c·x⁵ whose iteration draws all singular values in (0, 1] to about 1. Source: Keller
# Jordan, "Muon: an optimizer for hidden layers" (2024); the coefficients of torch.optim.Muon.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrices: torch.Tensor, *, num_steps: int = 5, eps: float = 1e-7, max_elements: int = 1 << 24
) -> torch.Tensor:
    """Replaces each matrix U·S·Vᵀ by about U·Vᵀ.

    Shapes: matrices [M, R, C] or [R, C]; returns the same shape in bf16. Computed in bf16 with fp32 norms; the
    smaller side is iterated. A zero matrix stays zero. Memory: chunks of at most `max_elements` elements, or one
    matrix, times about four. Communication: none.
    """
    if matrices.ndim == 2:
        return orthogonalize(matrices[None], num_steps=num_steps, eps=eps, max_elements=max_elements)[0]
    chunk = max(1, max_elements // max(1, matrices[0].numel()) if len(matrices) else 1)
    out = torch.empty(matrices.shape, dtype=torch.bfloat16, device=matrices.device)
    for start in range(0, len(matrices), chunk):
        part = slice(start, start + chunk)
        out[part] = _iterate(matrices[part].to(torch.bfloat16), num_steps, eps)
    return out


def _iterate(x: torch.Tensor, num_steps: int, eps: float) -> torch.Tensor:
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x / norm.clamp(min=eps).to(x.dtype)
    a, b, c = QUINTIC
    for _ in range(num_steps):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x.mT if is_tall else x
