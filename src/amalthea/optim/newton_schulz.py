"""Orthogonalization by Newton-Schulz, for many matrices of one shape at a time.

A step multiplies X by an even polynomial of its Gram matrix, X ← (a·I + b·G + c·G²)·X with G = X·Xᵀ, and draws the
singular values towards 1. The *standard* form does just that. The *Gram* form leaves X alone for a few steps: it
moves G instead and collects the polynomials in Q, then applies Q to X once. On wide matrices that saves products
with the long side. Errors in G grow where singular values are tiny, so it *restarts* (forms G anew from X) every
two steps; without restarts it explodes on spectra like 1/k.

Shape legend: M matrices, R rows, C columns, S = min(R, C).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from amalthea.core.scratch import Scratch
from amalthea.core.tensors import DTYPES
from amalthea.optim.flops import orthogonalize_flops as orthogonalize_flops

Coefficients = Literal["quintic", "polar_express", "youj"]
Form = Literal["standard", "gram"]
Products = Literal["bf16", "fp32"]
Step = tuple[float, float, float]
"""a, b, c of one step."""

_QUINTIC = (3.4445, -4.7750, 2.0315)
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_POLAR_EXPRESS_SAFETY = 1.01
_YOUJ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

GRAM_MIN_ASPECT = 1.5
"""The Gram form costs less from about this ratio of sides; squarer matrices take the standard form."""


def polynomials(coefficients: Coefficients, num_steps: int) -> tuple[Step, ...]:
    """(a, b, c) of each step.

    Sources: `quintic` Keller Jordan, "Muon" (2024), also torch.optim.Muon's; `polar_express` arXiv 2505.16932, with
    its safety factor 1.01 on all steps but the last and its limit (15/8, −10/8, 3/8) for further steps; `youj` You
    Jiacheng's five-step set (2024), which exists for five steps only (ValueError otherwise).
    """
    if coefficients == "quintic":
        return (_QUINTIC,) * num_steps
    if coefficients == "youj":
        if num_steps != len(_YOUJ):
            raise ValueError(f"the coefficients youj are for {len(_YOUJ)} steps, not {num_steps}")
        return _YOUJ
    steps = (*_POLAR_EXPRESS, *(_POLAR_EXPRESS[-1],) * num_steps)[:num_steps]
    safety = _POLAR_EXPRESS_SAFETY
    return (*((a / safety, b / safety**3, c / safety**5) for a, b, c in steps[:-1]), steps[-1])


def elements_at_work(rows: int, columns: int) -> int:
    """Elements that one matrix keeps in use while it is orthogonalized: its iterate and two Gram matrices."""
    return rows * columns + 2 * min(rows, columns) ** 2


def orthogonalize(
    matrices: torch.Tensor,
    *,
    num_steps: int = 5,
    coefficients: Coefficients = "quintic",
    form: Form = "standard",
    products: Products = "bf16",
    eps: float = 1e-7,
    max_elements: int = 1 << 26,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Replaces each matrix U·S·Vᵀ by about U·Vᵀ.

    Shapes: matrices [M, R, C] or [R, C], any float dtype; returns the same shape in bf16, in `out` if given, which may
    be `matrices`. Cast to bf16 *before* the norm is taken (in fp32), so bf16 input gives the same bits as its fp32
    original, whatever the dtype of the `products`. The smaller side is iterated. A zero matrix stays zero; a matrix
    with a non-finite entry becomes NaN, alone. Memory: from `scratch`, for `max_elements` elements at a time or one
    matrix, times about two, or three of square ones. Communication: none.
    """
    rows, columns = matrices.shape[-2:]
    stack = matrices.view(-1, rows, columns) if matrices.ndim == 2 else matrices
    if out is None:
        out = torch.empty(matrices.shape, dtype=torch.bfloat16, device=matrices.device)
    scratch = scratch or Scratch(matrices.device)
    steps = polynomials(coefficients, num_steps)
    use_gram = form == "gram" and max(rows, columns) >= GRAM_MIN_ASPECT * min(rows, columns)
    groups = _groups_between_restarts(steps) if use_gram else [(step,) for step in steps]
    chunk = max(1, max_elements // max(1, rows * columns))
    for given, part in zip(stack.split(chunk), out.view(stack.shape).split(chunk), strict=True):
        _iterate(given, groups, products=products, eps=eps, out=part, scratch=scratch)
    return out


def _iterate(
    given: torch.Tensor,
    groups: Sequence[Sequence[Step]],
    *,
    products: Products,
    eps: float,
    out: torch.Tensor,
    scratch: Scratch,
) -> None:
    """X moves between two buffers, once for each group, and so that it ends in `out`, or in its like in fp32."""
    dtype = DTYPES[products]
    end = out if out.dtype == dtype else scratch.take("result", *out.shape, dtype=dtype)
    spare = scratch.take("iterate", *out.shape, dtype=dtype)
    here, there = (end, spare) if len(groups) % 2 == 0 else (spare, end)
    _normalize(given, eps=eps, out=here)
    for group in groups:
        scalar, polynomial = _collect(_gram(here, scratch), group, scratch)
        _multiply(here, scalar, polynomial, out=there)
        here, there = there, here
    if end is not out:
        out.copy_(end)


def _normalize(matrices: torch.Tensor, *, eps: float, out: torch.Tensor) -> None:
    """Divides each matrix by its norm; a norm in bf16 is summed in fp32 and rounded once."""
    x = matrices.to(torch.bfloat16)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    torch.div(x.to(out.dtype), norm.clamp(min=eps), out=out)


def _gram(x: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """X·Xᵀ, or Xᵀ·X of tall matrices: the smaller of the two, [M, S, S]."""
    count, rows, columns = x.shape
    side = min(rows, columns)
    left, right = (x.mT, x) if rows > columns else (x, x.mT)
    return torch.bmm(left, right, out=scratch.take("gram", count, side, side, dtype=x.dtype))


def _multiply(x: torch.Tensor, scalar: float, polynomial: torch.Tensor, *, out: torch.Tensor) -> None:
    """(scalar·I + polynomial)·X, or X·(scalar·I + polynomial) of tall matrices: no transpose is ever copied."""
    left, right = (x, polynomial) if x.shape[-2] > x.shape[-1] else (polynomial, x)
    torch.baddbmm(x, left, right, beta=scalar, out=out)


def _collect(gram: torch.Tensor, group: Sequence[Step], scratch: Scratch) -> tuple[float, torch.Tensor]:
    """The product of a group's one or two polynomials in the Gram matrix, as scalar·I + matrix.

    The scalar stays apart, in full precision: a bf16 diagonal would round it.
    """

    def into(name: str) -> torch.Tensor:
        return scratch.take(name, *gram.shape, dtype=gram.dtype)

    a, b, c = group[0]
    first = torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=into("first polynomial"))
    if len(group) == 1:
        return a, first
    half = torch.baddbmm(gram, first, gram, beta=a, out=into("half"))
    gram = torch.baddbmm(half, half, first, beta=a, out=into("gram"))
    a_next, b, c = group[1]
    second = torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=half)
    product = torch.baddbmm(first, second, first, beta=a_next, out=gram)
    # addcmul takes its factor in fp32; the alpha of an add would be rounded to bf16 on the CPU.
    return a * a_next, product.addcmul_(second, product.new_ones(()), value=a)


def _groups_between_restarts(steps: tuple[Step, ...]) -> list[tuple[Step, ...]]:
    """Pairs of steps; of an odd number the one before the last pair is alone.

    On a flat spectrum that order stays nearest to the standard form: the last pair starts from a fresh Gram matrix.
    """
    if len(steps) % 2 == 0 or len(steps) < 3:
        return [steps[i : i + 2] for i in range(0, len(steps), 2)]
    return [*(steps[i : i + 2] for i in range(0, len(steps) - 3, 2)), (steps[-3],), steps[-2:]]
