"""Bytes of live tensor storages, counted as operations make them and as they are freed.

For machines whose allocator keeps no such count (CPU) and for tensors that have no bytes (fake ones). A *holding* is
one storage, whatever the number of tensors that look into it; it is *live* from the operation that first returned it
until its last tensor is gone. FSDP2 frees gathered parameters by `resize_(0)` and keeps the storage, so that is
watched too.

Source: the idea of PyTorch's `torch.distributed._tools.mem_tracker`; less is told apart here, and so it costs less.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from amalthea.core.tensors import local_tensor

_WRAPPERS = (DTensor, AsyncCollectiveTensor)
_resize = torch.UntypedStorage.resize_


@dataclass
class Holding:
    """A live storage: what first returned it, for whom."""

    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: str
    """Such as `aten.mm`."""
    module: str
    """Module whose forward pass was running, empty outside one (backward and optimizer)."""
    storage: weakref.ref[torch.UntypedStorage]


class StorageTracker(TorchDispatchMode):
    """While active, counts the storages that operations return, on every device, fake tensors' included.

    `live_bytes` is the sum now, `peak_bytes` the largest since `reset_peak`. What existed before is counted once given
    to `add`, or once an operation returns a view of it. Sees what passes PyTorch's dispatcher in this thread and in
    autograd's: not the scratch inside a kernel, nor what a C++ collective allocates for itself.

    Cost: about 15 µs an operation; see docs/concepts/memory.md for its share of a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._holdings: dict[int, Holding] = {}
        self._module_names: dict[int, str] = {}
        self._running: list[str] = []

    def name_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """From here on holdings are told by the module that made them; a later name of a module counts."""
        self._module_names = {id(module): name for name, module in modules}

    def add(self, tensor: torch.Tensor) -> None:
        """Counts the storage of a tensor that was there before."""
        self._see(local_tensor(tensor), "before")

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def holdings(self) -> list[Holding]:
        """All live storages with bytes, largest first."""
        return sorted((h for h in self._holdings.values() if h.num_bytes), key=lambda h: -h.num_bytes)

    def __enter__(self) -> Self:
        self._hooks = (register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave))
        # The method of the class, so that every storage is seen, whoever resizes it.
        torch.UntypedStorage.resize_ = self._resizing()  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Wrappers take themselves apart first, and their parts' operations come here.
        if types and any(issubclass(kind, _WRAPPERS) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self._see(out, func)
        elif isinstance(out, list | tuple):
            for tensor in _tensors(out):
                self._see(tensor, func)
        return out

    def _see(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._holdings:
            return
        num_bytes = storage.nbytes()
        holding = Holding(
            num_bytes,
            tuple(tensor.shape),
            tensor.dtype,
            str(func).removesuffix(".default"),
            self._running[-1] if self._running else "",
            weakref.ref(storage, lambda _: self._forget(key)),
        )
        self._holdings[key] = holding
        self._grow(num_bytes)

    def _forget(self, key: int) -> None:
        holding = self._holdings.pop(key, None)
        if holding is not None:
            self.live_bytes -= holding.num_bytes

    def _grow(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _resizing(self) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            _resize(storage, size)
            holding = self._holdings.get(storage._cdata)
            if holding is not None:
                self._grow(storage.nbytes() - holding.num_bytes)
                holding.num_bytes = storage.nbytes()
            return storage

        return resize_

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._module_names.get(id(module), self._running[-1] if self._running else ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()


def _tensors(out: list[Any] | tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for item in out:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)
