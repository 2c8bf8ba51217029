"""Formulas as one operation each, which Inductor compiles into one kernel.

A formula becomes an operator of torch, so that a trace sees one operation with its inputs and outputs. On real memory
the operator runs the compiled formula, by way of Triton on a GPU and of C++ on a CPU. On fake memory it runs the
formula as it reads, for the shapes of its results.

The last dim of a tensor is compiled as the number that it is, so that rows are read in whole vectors. The dims before
it are compiled as unknowns, so that another number of rows compiles nothing. A tensor of at most one row is not worth a
compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

from amalthea.core.errors import ConfigError

_MOST_VARIANTS = 64
"""Of one formula in a process, for its widths, dtypes and strides; one more is an error, never a silently slow step."""

R = TypeVar("R")


def fused(formula: Callable[..., R]) -> Callable[..., R]:
    """`formula` as the operator `amalthea::NAME`, of the formula's name; it has no gradient.

    The formula takes tensors, the first of them the largest, and numbers, and returns new tensors. Memory: its results.
    Raises torch's own errors where Inductor cannot compile on this machine; `check_compiler` asks before a run.
    """

    @cache
    def compiled() -> Callable[..., R]:
        options = {"fullgraph": True, "recompile_limit": _MOST_VARIANTS}
        return torch.compile(formula, **options)  # pyright: ignore[reportCallIssue, reportArgumentType] - its stub lacks the limit

    def run(*args: object) -> R:
        first = args[0]
        assert isinstance(first, torch.Tensor)
        if first.numel() <= first.shape[-1]:
            return formula(*args)
        return compiled()(*(_with_unknown_rows(a) if isinstance(a, torch.Tensor) else a for a in args))

    schema = torch.library.infer_schema(formula, mutates_args=())
    operator = torch.library.custom_op(f"amalthea::{formula.__name__.strip('_')}", run, mutates_args=(), schema=schema)
    operator.register_fake(formula)
    return operator


def _with_unknown_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory. Marks stay on a tensor, and what requires a gradient would be compiled a second time."""
    rows = tensor.detach()
    torch._dynamo.maybe_mark_dynamic(rows, tuple(range(rows.ndim - 1)))
    return rows


def check_compiler(device: torch.device) -> None:
    """Compiles and runs a small kernel on a device; some seconds. Raises ConfigError where that does not work."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    ones = torch.ones(2, 16, device=device)
    try:
        works = bool((torch.compile(twice, fullgraph=True)(ones) == 2).all())
        reason = "a compiled kernel gives wrong numbers"
    except Exception as error:
        works, reason = False, str(error).strip().partition("\n")[0]
    if not works:
        raise ConfigError(
            f"kernels is fused, but no kernel can be compiled for {device} ({reason}); "
            "install Triton and a C compiler on every node, or set kernels=eager"
        )
