"""Fused kernels, compiled here by way of C++: each equals its twin, is one kernel, and is compiled once.

Shape legend: N rows, F hidden features; B sequences, S positions, H heads, d head dim.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch._inductor.config
from support.tiny import SEQ_LEN, SEQUENCES, tiny_config
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from amalthea.config.check import resolve
from amalthea.core.errors import ConfigError
from amalthea.core.world import World
from amalthea.kernels import fused, permute, rope, swiglu
from amalthea.kernels.device import as_on_gpu
from amalthea.kernels.fused import check_compiler
from amalthea.plan.events import Kernel, Phase, Trace
from amalthea.plan.trace import trace_step
from amalthea.plan.trace.calls import CallBook, materialize
from amalthea.train.build import build
from amalthea.train.step import train_step

BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCES = {BF16: 2**-8, FP32: 2e-6}
"""Relative: one rounding of bf16 at the end, a few of fp32."""
F, D = 43, 14
EXPERTS = 24


@pytest.fixture
def in_process() -> Iterator[None]:
    """Compiles without a pool of processes, which would cost more than it saves here."""
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("Inductor needs a C++ compiler here")
    with torch._inductor.config.patch(compile_threads=1):
        yield


def gated(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gate, up, weights; and the gradient from above."""
    generator = torch.Generator().manual_seed(rows)
    gate, up, grad = (3 * torch.randn(rows, F, generator=generator) for _ in range(3))
    return [tensor.to(dtype) for tensor in (gate, up, torch.rand(rows, generator=generator), grad)]


def turned(shape: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """x, cos, sin; and the gradient from above."""
    generator = torch.Generator().manual_seed(sum(shape))
    x, grad = (torch.randn(*shape, D, generator=generator) for _ in range(2))
    angles = torch.rand(shape[1], D // 2, generator=generator) * 6
    return [x.to(dtype), angles.cos(), angles.sin(), grad.to(dtype)]


def results(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], learned: int) -> list[torch.Tensor]:
    """The output and the gradients of the first `learned` inputs; the last input is the gradient from above."""
    *given, grad = inputs
    leaves = [tensor.clone().requires_grad_() for tensor in given[:learned]]
    out = function(*leaves, *given[learned:])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_equal(
    function: Callable[..., torch.Tensor],
    twin: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    *,
    learned: int,
) -> None:
    """To the tolerance of the dtype, of the twin in fp64."""
    dtype = inputs[0].dtype
    with as_on_gpu():
        got = results(function, inputs, learned)
    expected = results(twin, [tensor.double() for tensor in inputs], learned)
    for left, right in zip(got, expected, strict=True):
        assert left.dtype == dtype
        torch.testing.assert_close(left.double(), right, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def compilations() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP32, marks=pytest.mark.slow)])
def test_weighted_activation(dtype: torch.dtype) -> None:
    before = compilations()
    for rows in (7, 130, 2, 1, 0):
        assert_equal(swiglu.weighted_swiglu, swiglu.swiglu_plain, gated(rows, dtype), learned=3)
    assert compilations() == before + 2, "one each way, whatever the number of rows"


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_activation_with_any_leading_shape() -> None:
    before = compilations()
    for rows in (6, 130):
        gate, up, _, grad = (tensor.unflatten(0, (2, -1)) for tensor in gated(rows, BF16))
        assert_equal(swiglu.swiglu, swiglu.swiglu_plain, [gate, up, grad], learned=2)
    assert compilations() == before + 2


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP32, marks=pytest.mark.slow)])
def test_rotation(dtype: torch.dtype) -> None:
    before = compilations()
    for shape in ((2, 9, 5), (3, 33, 2), (0, 9, 5)):
        assert_equal(rope.rotate, rope.rotate_plain, turned(shape, dtype), learned=1)
    assert compilations() == before + 2, "one each way, whatever the batch, the positions and the heads"


FORMULAS: dict[str, tuple[Any, list[torch.Tensor | int]]] = {
    "swiglu_forward": (swiglu._swiglu_forward, [*gated(9, BF16)[:2], torch.rand(9, 1).to(BF16)]),
    "weighted_swiglu_backward": (
        swiglu._weighted_swiglu_backward,
        [*gated(9, BF16)[:2], gated(9, BF16)[3], torch.rand(9, 1).to(BF16)],
    ),
    "rotation": (rope._rotation, [*turned((2, 9, 5), BF16)[:3], 1]),
    "rows_of_both": (permute._rows_of_both, [*gated(9, BF16)[:2], torch.randperm(9)]),
}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_one_kernel(name: str) -> None:
    operator, inputs = FORMULAS[name]
    torch._dynamo.reset()
    got, code = run_and_get_code(operator, *inputs)
    assert len(code) == 1
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(got, operator(*inputs), rtol=2**-7, atol=2**-7)
    assert code[0].count("async_compile.cpp_pybinding(") == 1
    assert "extern_kernels." not in code[0]


@pytest.mark.parametrize("leading", [(5,), (1, 4)])
def test_gradients_are_those_of_the_formulas(leading: tuple[int, ...]) -> None:
    """Against finite differences, in fp64, with the formulas run as they read."""
    gate, up = (torch.randn(*leading, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.rand(leading[-1], dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, leading[-1], 2, 6, dtype=torch.float64, requires_grad=True)
    angles = torch.rand(leading[-1], 3, dtype=torch.float64)
    with torch.compiler.set_stance("force_eager"), as_on_gpu():
        assert torch.autograd.gradcheck(swiglu.swiglu, (gate, up))
        assert torch.autograd.gradcheck(lambda t: rope.rotate(t, angles.cos(), angles.sin()), (x,))
        if len(leading) == 1:
            assert torch.autograd.gradcheck(swiglu.weighted_swiglu, (gate, up, weights))


@cache
def traced(**overrides: Any) -> Trace:
    config = tiny_config(precision="bf16", train__microbatch_sequences=4, model__moe__num_experts=EXPERTS, **overrides)
    return trace_step(config, rank=0, world_size=1, build=build, train_step=train_step, keep_calls=True)


def kernels(trace: Trace, name: str) -> list[Kernel]:
    return [event for event in trace.events if isinstance(event, Kernel) and event.name == name]


def test_a_traced_step_holds_one_kernel_for_each() -> None:
    """Two layers with routed and shared experts, two microbatches: every input is read and output written once."""
    trace, calls = traced(), 2 * 2
    tokens = 4 * SEQ_LEN
    rows, width, heads = 2 * tokens, 16, 4 + 2
    halves = tokens * heads * 8 * 2
    angles = 2 * SEQ_LEN * 4 * 4
    for name, count, num_bytes in (
        ("swiglu_forward", 2, 3 * (rows + tokens) * width * 2 + rows * 2),
        ("weighted_swiglu_backward", 1, 5 * rows * width * 2 + 2 * rows * 2),
        ("swiglu_backward", 1, 5 * tokens * width * 2),
        ("rotation", 4, 2 * (2 * halves + 2 * angles)),
    ):
        found = kernels(trace, name)
        assert len(found) == count * calls, name
        assert sum(kernel.bytes_moved for kernel in found) == num_bytes * calls, name
        assert all(kernel.flops == 0 and kernel.dtype == "bfloat16" for kernel in found)
    assert not [event for event in trace.events if isinstance(event, Kernel) and "silu" in event.name]
    assert SEQUENCES == 8


def test_a_traced_router_multiplies_bf16() -> None:
    trace = traced()
    forward = 2.0 * 4 * SEQ_LEN * 32 * EXPERTS
    found = [kernel for kernel in kernels(trace, "mm") if kernel.flops in (forward, 2 * forward)]
    assert {kernel.dtype for kernel in found} == {"bfloat16"}
    assert [kernel.flops for kernel in found].count(2 * forward) == 2 * 2 * 2, "two parts of each gradient"


def test_a_kept_router_product_is_not_run_again() -> None:
    trace = traced(memory__recompute="selective", memory__keep=("projections",))
    phase = Phase("")
    products: list[str] = []
    for event in trace.events:
        phase = event if isinstance(event, Phase) else phase
        if isinstance(event, Kernel) and event.flops and phase.name == "recompute":
            products.append(event.name)
    assert products
    assert "mm" not in products


def test_eager_by_choice() -> None:
    trace = traced(kernels="eager")
    assert kernels(trace, "silu")
    assert not [event for event in trace.events if isinstance(event, Kernel) and "swiglu" in event.name]
    assert not kernels(trace, "rotation")


def test_a_call_is_made_again_by_its_name() -> None:
    gate, up, weights, _ = gated(5, FP32)
    book = CallBook()
    operator = torch.ops.amalthea.swiglu_forward.default
    book.number(operator, (gate, up, weights[:, None]), {})
    assert book.calls[0].operator == "amalthea::swiglu_forward"
    with torch.compiler.set_stance("force_eager"):
        out = materialize(book.calls[0], device=torch.device("cpu")).run()
    assert isinstance(out, torch.Tensor)
    assert out.shape == (5, F)


def test_a_machine_that_cannot_compile_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Cannot find a working triton installation.\nMore lines.")

    monkeypatch.setattr(fused.torch, "compile", fails)
    with pytest.raises(ConfigError, match=r"for cpu \(Cannot find a working triton installation\.\).*kernels=eager"):
        check_compiler(torch.device("cpu"))


def test_a_run_on_a_gpu_asks_for_a_compiler_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise ConfigError(f"none for {device}")

    monkeypatch.setattr("amalthea.train.build.check_compiler", fails)
    config = tiny_config(device="cuda")
    world = World(rank=0, size=1, local_rank=0, local_size=1, device="cuda")
    with pytest.raises(ConfigError, match="none for cuda:0"):
        build(config, resolve(config, world_size=1), world)
