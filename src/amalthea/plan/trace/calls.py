"""Operations as they were called, without values: enough to call them again on real memory.

Two calls are the same where operator, shapes, strides, dtypes, shared memory and whole-number arguments are; a step of
many thousand operations has some hundred different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from amalthea.plan.trace.costs import operation, tensors

_FLOATS = (0.5, 1.5)
_BAGS = ("_embedding_bag", "_embedding_bag_forward_only")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a call. Tensors with one `storage` share it; `offset` counts elements in it."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """From the tensor's first element in its storage to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class FormatSpec:
    """A memory format, by its name in torch: pickled itself, it would name whatever module has torch in it, such as
    the user's recipe, which other processes do not find."""

    name: str


@dataclass(frozen=True)
class Call:
    """An operator and its arguments, tensors as specifications, lists as tuples."""

    operator: str
    """As torch names it: `aten::add.Tensor`. A name, so that a call travels between processes."""
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.operator.partition("::")[2].partition(".")[0]

    @property
    def function(self) -> Callable[..., object]:
        namespace, _, rest = self.operator.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name)
        return cast("Callable[..., object]", getattr(packet, overload or "default"))


@dataclass
class CallBook:
    """Numbers different calls in the order in which they are first seen."""

    calls: list[Call] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, func: Any, args: Any, kwargs: Any) -> int:
        writer = _Writer()
        values = tuple(map(writer.spec, args))
        named = tuple((name, writer.spec(value)) for name, value in sorted(kwargs.items()))
        key = (func, _without_floats(values), _without_floats(named))
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.calls)
            self.calls.append(Call(func.name(), values, named))
        return found


class _Writer:
    """Turns arguments of one call into specifications."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[int, int]] = {}
        """Number and first byte seen of each."""

    def spec(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self.spec, value))
        if isinstance(value, torch.memory_format):
            return FormatSpec(str(value).removeprefix("torch."))
        return value

    def _tensor(self, tensor: torch.Tensor) -> TensorSpec:
        first = int(tensor.storage_offset()) * tensor.element_size()
        number, start = self._storages.setdefault(tensor.untyped_storage()._cdata, (len(self._storages), first))
        # Where in a buffer of many a tensor lies says nothing of its cost; how tensors of a call overlap does. One
        # that begins before the first seen counts as beginning there.
        offset = max(0, first - start) // tensor.element_size()
        return TensorSpec(number, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _without_floats(value: Any) -> Any:
    """Learning rates and the like change from step to step and cost the same."""
    if isinstance(value, tuple):
        return tuple(map(_without_floats, value))
    return float if isinstance(value, float) else value


@dataclass(frozen=True)
class Ready:
    """A call on real memory. Where it changes what it reads, `refill` puts that back; else it is none."""

    run: Callable[[], object]
    refill: Callable[[], None] | None


def materialize(call: Call, *, device: torch.device) -> Ready:
    """`call` on new memory, its tensors': positive floats near 1, and whole numbers that are valid as what they are.

    Exponentials and products that are taken again and again of their own result overflow, and then cost something else.
    """
    given = (*call.args, *(value for _, value in call.kwargs))
    storages = _storages(list(_specs(given)), device)
    made: dict[TensorSpec, torch.Tensor] = {}
    for place, value in enumerate(given):
        for spec in _specs(value):
            if spec not in made:
                made[spec] = storages[spec.storage].view(spec.dtype).as_strided(spec.shape, spec.stride, spec.offset)
                _fill(made[spec], spec, call, place)

    def real(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return made[value]
        if isinstance(value, torch.device):
            return device
        if isinstance(value, FormatSpec):
            return getattr(torch, value.name)
        return [real(item) for item in value] if isinstance(value, tuple) else value

    args = [real(value) for value in call.args]
    kwargs = {name: real(value) for name, value in call.kwargs}
    function, facts = call.function, operation(call.function)
    changed = [] if facts.only_written else [args[place] for place in facts.written if place < len(args)]
    floats = [tensor for tensor in tensors(changed) if tensor.is_floating_point()]

    def refill() -> None:
        for tensor in floats:
            tensor.uniform_(*_FLOATS)

    return Ready(lambda: function(*args, **kwargs), refill if floats else None)


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _specs(item)


def _storages(specs: list[TensorSpec], device: torch.device) -> dict[int, torch.Tensor]:
    sizes: dict[int, int] = {}
    for spec in specs:
        end = (spec.offset + spec.num_elements) * spec.dtype.itemsize
        sizes[spec.storage] = max(sizes.get(spec.storage, 0), end)
    # Whole 16 bytes, so that every dtype can view it.
    return {n: torch.zeros(-(-size // 16) * 16, dtype=torch.uint8, device=device) for n, size in sizes.items()}


def _fill(tensor: torch.Tensor, spec: TensorSpec, call: Call, place: int) -> None:
    if 0 in spec.shape:
        return
    flat = tensor.as_strided((spec.num_elements,), (1,), spec.offset)
    if spec.dtype.is_floating_point:
        flat.uniform_(*_FLOATS)
    elif spec.dtype is torch.bool:
        flat.fill_(True)
    else:
        flat.copy_(_whole_numbers(call, place, flat.numel()))


def _whole_numbers(call: Call, place: int, count: int) -> torch.Tensor:
    """What argument number `place` may hold, int64 [count]."""
    args, numbers = call.args, torch.arange(count)
    if call.name == "_grouped_mm":
        # Ends of groups that cut the rows of the left matrix or, of two matrices, what is summed over.
        left, right = args[0].shape, args[1].shape
        return (numbers + 1) * (left[1] if len(left) == len(right) == 2 else left[0]) // count
    if call.name in ("_varlen_attn", "_varlen_attn_backward"):
        tokens = next(_specs(args)).shape[0]
        return numbers * tokens // max(1, count - 1)
    if call.name in _BAGS and place == 2:
        return numbers * args[1].shape[0] // count
    if call.name == "repeat_interleave":
        total = int(dict(call.kwargs)["output_size"])
        return torch.diff(torch.arange(count + 1) * total // count)
    # Scattered over the whole range, as ids of tokens and rows are.
    return numbers * 7919 % max(1, _index_bound(call))


def _index_bound(call: Call) -> int:
    """What indices stay below: the size of what they look into."""
    args = call.args
    if call.name in ("embedding", *_BAGS):
        return int(args[0].shape[0])
    if call.name in ("index", "index_put_", "index_put"):
        return min(size for size, index in zip(args[0].shape, args[1], strict=False) if index is not None)
    if call.name == "embedding_dense_backward":
        return int(args[2])
    if call.name in ("gather", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add_"):
        shape = args[0].shape
        return int(shape[args[1]]) if shape else 1
    return min((size for spec in _specs(args) for size in spec.shape), default=1)
