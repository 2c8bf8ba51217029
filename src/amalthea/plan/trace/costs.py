"""FLOP and bytes of one operation, from its schema and the shapes of its tensors.

Bytes are those that a kernel must read and write once: inputs, outputs, and both for what it changes in place. What a
cache saves or a second pass costs is not in them.

Shape legend: T tokens, H heads, d head dim, B sequences, S tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

_NO_KERNELS = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "detach_"),
        *("_unsafe_view", "lift_fresh", "lift", "_local_scalar_dense", "is_same_size", "requires_grad_"),
    )
)
_OVERWRITE = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"))
"""In-place operations that do not read what they change."""
_PICK = frozenset(("index_select", "embedding", "gather", "index"))
"""Read as much as they write, not their whole first input."""
_PUT = {"scatter_add_": 2, "index_put_": 1}
"""Change as many elements of their first input as their indices (argument number) have."""


@dataclass(frozen=True)
class Operation:
    """What follows from the schema alone."""

    name: str
    is_view: bool
    is_kernel: bool
    written: tuple[int, ...]
    """Arguments that are changed, by number; of these, `only_written` are not read."""
    written_keywords: tuple[str, ...]
    only_written: bool


@dataclass(frozen=True)
class Cost:
    flops: float
    num_bytes: int
    dtype: str


@lru_cache(maxsize=4096)
def operation(func: Any) -> Operation:
    """The facts about an operator."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    returns = [r.alias_info for r in schema.returns]
    changed = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    is_view = any(alias is not None and not alias.is_write for alias in returns)
    return Operation(
        name=name,
        is_view=is_view and not changed,
        is_kernel=not is_view and name not in _NO_KERNELS,
        written=tuple(i for i, a in changed if not a.kwarg_only),
        written_keywords=tuple(a.name for _, a in changed if a.kwarg_only),
        only_written=name in _OVERWRITE,
    )


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in an argument or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item


def multiplies(name: str) -> bool:
    """Whether an operation is one of those whose FLOP are counted: products and attention."""
    return name in _FLOPS


def cost(op: Operation, args: Any, kwargs: Any, out: Any, *, pairs: Callable[[int], float]) -> Cost:
    """What a call of an operation costs.

    `pairs` maps the tokens of one pass to the (query, key) pairs that attention inside documents looks at.
    """
    formula = _FLOPS.get(op.name)
    flops = 0.0 if formula is None else formula(args, pairs)
    results = list(tensors(out))
    dtype = next((t.dtype for t in (*results, *_inputs(args)) if t.is_floating_point()), None)
    if formula is not None:
        # What is multiplied sets the speed; sums, and an attention's log-sum-exp, may be wider.
        dtype = min((t.dtype for t in _inputs(args) if t.is_floating_point()), key=lambda dtype: dtype.itemsize)
    return Cost(flops, _bytes(op, args, kwargs, results), "other" if dtype is None else str(dtype)[6:])


def _inputs(args: Any) -> Iterator[torch.Tensor]:
    for value in args:
        yield from tensors(value)


def _bytes(op: Operation, args: Any, kwargs: Any, results: list[torch.Tensor]) -> int:
    if op.name in _PICK:
        return 2 * sum(map(_size, results)) + sum(_size(t) for value in args[1:] for t in tensors(value))
    if op.name in _PUT:
        indices = list(tensors(args[_PUT[op.name]]))
        count = max(index.numel() for index in indices)
        return 3 * count * args[0].element_size() + sum(map(_size, indices))
    if op.name == "all_gather_copy_in":
        return 2 * sum(map(_size, tensors(args[0])))
    changed = [t for i in op.written if i < len(args) for t in tensors(args[i])]
    outs = [t for name in op.written_keywords for t in tensors(kwargs.get(name))]
    changed_ids = {id(t) for t in changed}
    given = (*args, *(value for name, value in kwargs.items() if name not in op.written_keywords))
    read = sum(_size(t) for t in _inputs(given) if id(t) not in changed_ids)
    written = sum(map(_size, changed)) * (1 if op.only_written else 2) + sum(map(_size, outs))
    changed_ids |= {id(t) for t in outs}
    return read + written + sum(_size(t) for t in results if id(t) not in changed_ids)


def _size(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor shows, each once where it is expanded."""
    if 0 in tensor.stride():
        count = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            count *= size if stride or not size else 1
        return count * tensor.element_size()
    return tensor.numel() * tensor.element_size()


def _product(first: int) -> Callable[[Any, Any], float]:
    """Matrix products, stacked or by groups, of arguments number `first` and the next."""

    def flops(args: Any, pairs: Any) -> float:
        left, right = args[first], args[first + 1]
        return 2.0 * left.numel() * (right.shape[-1] if right.ndim > 1 else 1)

    return flops


def _varlen(query: int, products: int) -> Callable[[Any, Any], float]:
    """Attention inside documents, query [T, H, d]: so many products of 2·H·d for each pair."""

    def flops(args: Any, pairs: Callable[[int], float]) -> float:
        tokens, heads, head_dim = args[query].shape
        return products * 2.0 * heads * head_dim * pairs(tokens)

    return flops


def _sdpa(query: int, products: int, causal: int) -> Callable[[Any, Any], float]:
    """The CPU's attention, query [B, H, S, d]; argument number `causal` says whether pairs are masked."""

    def flops(args: Any, pairs: Any) -> float:
        sequences, heads, length, head_dim = args[query].shape
        is_causal = len(args) > causal and args[causal]
        seen = length * (length + 1) / 2 if is_causal else length**2
        return products * 2.0 * sequences * heads * head_dim * seen

    return flops


_FLOPS: dict[str, Callable[[Any, Callable[[int], float]], float]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "_grouped_mm"), _product(0)),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_", "addmv"), _product(1)),
    # Backward forms the scores again: five products where forward has two.
    "_varlen_attn": _varlen(0, 2),
    "_varlen_attn_backward": _varlen(1, 5),
    "_scaled_dot_product_flash_attention_for_cpu": _sdpa(0, 2, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa(1, 5, 7),
}
