"""The dispatch mode that sees every operation: kernels, collectives, and the storages that they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from amalthea.core.errors import ConfigError
from amalthea.plan.events import Kernel
from amalthea.plan.trace.calls import CallBook
from amalthea.plan.trace.collectives import NAMESPACES, Collectives
from amalthea.plan.trace.costs import Operation, cost, operation, tensors
from amalthea.plan.trace.fakes import FastFakes
from amalthea.plan.trace.recorder import Recorder

STAND_IN = 1_000_000.0
"""What a value reads as that only a device would know: a loss of 1, and a gradient norm that is clipped."""


class Tracer(TorchDispatchMode):
    """While active, writes down what this thread's operations do.

    Entered above a fake `mode`, it runs no collectives; without one, everything runs and is written down too, which is
    how a trace is compared with a real step. `pairs` is as in `costs.cost`; `calls` is given the different calls.
    """

    def __init__(
        self,
        recorder: Recorder,
        collectives: Collectives,
        *,
        pairs: Callable[[int], float],
        mode: FakeTensorMode | None = None,
        calls: CallBook | None = None,
    ) -> None:
        super().__init__()
        self.recorder, self.collectives, self.pairs, self.calls = recorder, collectives, pairs, calls
        self._fakes = None if mode is None else FastFakes(mode)
        self._looks_away = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._looks_away:
            return func(*args, **kwargs)
        if DTensor in types:
            return NotImplemented  # it comes back as operations on local tensors
        if func.namespace == "prim":
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if self._fakes is not None and func.namespace in NAMESPACES:
            return self.collectives.record(func, args)
        if func.namespace == "c10d":
            self.collectives.observe(func, args)
            return func(*args, **kwargs)
        op = operation(func)
        out = func(*args, **kwargs) if self._fakes is None else self._run_fake(self._fakes, func, op, args, kwargs)
        for tensor in tensors(out):
            self.recorder.see(tensor, op.name)
        if op.is_kernel and self.recorder.is_recording:
            what = cost(op, args, kwargs, out, pairs=self.pairs)
            if what.num_bytes:
                number = -1 if self.calls is None else self.calls.number(func, args, kwargs)
                kernel = Kernel(op.name, self.recorder.stream, what.flops, what.num_bytes, what.dtype, number)
                self.recorder.write(kernel)
        return out

    @contextmanager
    def without_imagined(self) -> Iterator[None]:
        """Inside, what DTensor runs on imagined whole tensors, to learn a result's shape, is not written down."""
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(propagator: ShardingPropagator, schema: Any) -> Any:
            self._looks_away = True
            try:
                return propagate(propagator, schema)
            finally:
                self._looks_away = False

        with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen):
            yield

    def _run_fake(self, fakes: FastFakes, func: Any, op: Operation, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_mm(*args)
        try:
            return fakes.run(func, op, args, kwargs)
        except DataDependentOutputException:
            return stand_in(args[0].dtype)
        except DynamicOutputShapeException:
            raise ConfigError(
                f"the step calls {func}, whose result is as large as values say, and a plan has no values; "
                "let shapes follow from those of inputs, as with torch.where instead of a mask as an index"
            ) from None
        except UnsupportedOperatorException:
            raise ConfigError(
                f"the step calls {func}, which has no fake kernel to tell shapes by; give it one with "
                "torch.library.register_fake"
            ) from None


def stand_in(dtype: torch.dtype) -> float | int | bool:
    """`STAND_IN` as a value of a dtype."""
    if dtype is torch.bool:
        return True
    return STAND_IN if dtype.is_floating_point else int(STAND_IN)


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *rest: Any) -> torch.Tensor:
    """Shapes of the result alone, in every dtype; torch's own fake kernel knows bf16 only."""
    if left.ndim == right.ndim == 2:
        if offs is None:
            raise ConfigError("the step calls grouped_mm with two matrices and no offs; give the ends of the groups")
        return left.new_empty((offs.shape[0], left.shape[0], right.shape[1]))
    return left.new_empty((*left.shape[:-1], right.shape[-1]))
