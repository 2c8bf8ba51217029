"""A device that is not the host, for a machine that has one memory: what may not be mixed is refused.

Beside a GPU a kernel that is given a tensor in host memory fails. Here both are the same memory, so a dispatch mode
knows the storages that rest and lets only copies touch them.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amalthea.core.tensors import local_tensor
from amalthea.memory.copies import DirectCopies, Ticket
from amalthea.train.build import Run


class GuardedCopies(DirectCopies):
    """Says when it copies, and what of the device it gave is still held."""

    def __init__(self) -> None:
        self.is_copying = False
        self._given: list[StorageWeakRef] = []

    @property
    def num_on_device(self) -> int:
        return sum(not given.expired() for given in self._given)

    def device_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = super().device_buffer(elements, dtype)
        self._given.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        return self._copy(source.reshape(-1), target)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        return self._copy(source, target)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        self.is_copying = True
        target.copy_(source)
        self.is_copying = False
        return Ticket()


class GuardsHost:
    """Inside, an optimizer's operation on parameters or gradients as they rest fails; views are none.

    It looks from when gradients have arrived until the step's end; gathers are FSDP2's own.
    """

    def __init__(self, run: Run, copies: GuardedCopies) -> None:
        self.num_operations = 0
        self._run, self._copies = run, copies
        self._methods = ("reduce_over_replicas", "grad_norm", "scale_grads", "step")

    def __enter__(self) -> Self:
        for name in self._methods:
            setattr(self._run.optimizers, name, self._guarded(getattr(self._run.optimizers, name)))
        self._run.optimizers.each_weight = self._guarded_each(self._run.optimizers.each_weight)  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        for name in (*self._methods, "each_weight"):
            delattr(self._run.optimizers, name)

    def _guarded(self, call: Any) -> Any:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with _Mode(self, self._copies, self._resting()):
                return call(*args, **kwargs)

        return inside

    def _guarded_each(self, call: Any) -> Any:
        def inside(names: list[str]) -> Any:
            with _Mode(self, self._copies, self._resting()):
                yield from call(names)

        return inside

    def _resting(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for name, parameter in self._run.model.named_parameters():
            found[local_tensor(parameter.data).untyped_storage()._cdata] = name
            if parameter.grad is not None:
                found[local_tensor(parameter.grad).untyped_storage()._cdata] = f"gradient of {name}"
        return found


class _Mode(TorchDispatchMode):
    def __init__(self, guard: GuardsHost, copies: GuardedCopies, resting: dict[int, str]) -> None:
        super().__init__()
        self._guard, self._copies, self._resting = guard, copies, resting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._copies.is_copying and not func.is_view and func.namespace != "c10d":
            self._guard.num_operations += 1
            for leaf in tree_leaves((args, kwargs)):
                # Its shape may be asked for, as by `zeros_like`, but not its memory.
                if type(leaf) is torch.Tensor and leaf.numel() and "_like" not in func.name():
                    name = self._resting.get(leaf.untyped_storage()._cdata)
                    assert name is None, f"{func} was given {name} as it rests in host memory"
        return func(*args, **(kwargs or {}))
