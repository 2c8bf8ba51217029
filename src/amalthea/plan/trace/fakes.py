"""Fake operations, fast: what `FakeTensorMode` found out once about an operation on such shapes holds again.

A step of a large model is tens of thousands of operations, of few kinds. The mode's own cache costs several times what
is needed here, where shapes are numbers and there is one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from amalthea.plan.trace.costs import Operation, tensors

_HOST = torch.device("cpu")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _New(NamedTuple):
    """A result with memory of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Same(NamedTuple):
    """A result that is an argument: argument number `position`."""

    position: int


_Recipe = tuple[type, list["_New | _Same"]]
"""Of what type the result is (a tensor, a tuple, a list, none), and of which tensors it is made."""


class FastFakes:
    """Runs operations under a `FakeTensorMode` that is the innermost mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._recipes: dict[Any, _Recipe | None] = {}

    def run(self, func: Callable[..., Any], op: Operation, args: Any, kwargs: Any) -> Any:
        """The result of `func`, as the mode would give it."""
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if op.is_view and isinstance(args[0], FakeTensor):
            return self._view(func, args, kwargs)
        recipe = self._recipes.get(key)
        if recipe is not None:
            return self._follow(recipe, args)
        out = func(*args, **kwargs)
        self._recipes[key] = _recipe(out, args, kwargs)
        return out

    def _view(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with in_kernel_invocation_manager(self._mode):
            out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            return FakeTensor(self._mode, out, _HOST)
        return type(out)(FakeTensor(self._mode, part, _HOST) for part in out)

    def _follow(self, recipe: _Recipe, args: Any) -> Any:
        kind, parts = recipe
        if kind is type(None):
            return None
        with in_kernel_invocation_manager(self._mode):
            made = [
                args[part.position]
                if isinstance(part, _Same)
                else torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
                for part in parts
            ]
        out = [t if isinstance(t, FakeTensor) else FakeTensor(self._mode, t, _HOST) for t in made]
        return out[0] if kind is torch.Tensor else kind(out)


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """What the shapes of results depend on; none where something in it is not known to be plain."""
    parts: list[Any] = [func]
    if not _add(parts, args):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _add(parts, (value,)):
            return None
    return tuple(parts)


def _add(parts: list[Any], values: Any) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, FakeTensor) or value.constant is not None:
                return False
            parts.extend((value.shape, value.stride(), value.dtype))
        elif isinstance(value, _PLAIN):
            parts.append((type(value), value))
        elif isinstance(value, (list, tuple)):
            parts.append(len(value))
            if not _add(parts, value):
                return False
        else:
            return False
    return True


def _recipe(out: Any, args: Any, kwargs: Any) -> _Recipe | None:
    """How to make such a result again; none where that is not clear."""
    if out is None:
        return type(None), []
    if not isinstance(out, (torch.Tensor, tuple, list)):
        return None
    found = list(tensors(out))
    if not isinstance(out, torch.Tensor) and len(found) != len(out):
        return None
    given = {t.untyped_storage()._cdata for value in (*args, *kwargs.values()) for t in tensors(value)}
    parts: list[_New | _Same] = []
    for tensor in found:
        position = next((i for i, value in enumerate(args) if value is tensor), None)
        if position is not None:
            parts.append(_Same(position))
        elif (
            isinstance(tensor, FakeTensor)
            and tensor.constant is None
            and tensor.untyped_storage()._cdata not in given
            and tensor.storage_offset() == 0
        ):
            parts.append(_New(tensor.shape, tensor.stride(), tensor.dtype))
        else:
            return None
    return torch.Tensor if isinstance(out, torch.Tensor) else type(out), parts
