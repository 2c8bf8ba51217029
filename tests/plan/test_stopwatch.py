"""Single operations and collectives, timed in processes of their own, and a step simulated from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.timelines import ROUND, exact

from amalthea.core.errors import ConfigError
from amalthea.plan.events import COMPUTE, Collective, Exchange, Kernel, Trace
from amalthea.plan.machine import open_machine
from amalthea.plan.stopwatch import Stopwatch
from amalthea.plan.timeline import Clocked, Simulator
from amalthea.plan.trace.calls import Call, CallBook


@pytest.fixture(scope="module")
def pair() -> Iterator[Stopwatch]:
    with Stopwatch(2, threads=1, budget_s=0.02) as stopwatch:
        yield stopwatch


def product(side: int, function: Any = torch.ops.aten.mm.default) -> Call:
    book = CallBook()
    book.number(function, tuple(torch.empty(side, side, device="meta") for _ in range(2)), {})
    return book.calls[0]


def test_what_is_larger_takes_longer(pair: Stopwatch) -> None:
    small, large = pair.kernels([product(64), product(512)])
    # 512 times the FLOP: a busy machine may hide most of that, but not all.
    assert 0 < 10 * small < large
    little, much = pair.exchanges(
        [Exchange("all_reduce", (0, 1), 64, 64), Exchange("all_reduce", (0, 1), 1 << 24, 1 << 24)]
    )
    assert 0 < 2 * little < much


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce"])
def test_every_kind_of_collective_is_timed(pair: Stopwatch, kind: Any) -> None:
    sizes = {"all_gather": (1000, 2000), "reduce_scatter": (2000, 1000)}.get(kind, (1000, 1000))
    assert pair.exchanges([Exchange(kind, (0, 1), *sizes)])[0] > 0
    assert pair.exchanges([Exchange(kind, (0,), 1000, 1000)])[0] > 0  # each rank by itself


def test_processes_have_the_threads_that_they_are_given(pair: Stopwatch) -> None:
    assert pair.threads == 1


def test_left_to_torch_processes_have_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Stopwatch(1) as stopwatch:
        assert stopwatch.threads == 1


def test_what_was_measured_once_is_kept(pair: Stopwatch) -> None:
    assert pair.kernels([product(48)]) == pair.kernels([product(48)])


def test_a_call_that_fails_is_an_error_that_names_it() -> None:
    bad = Call("aten::mm", (), ())
    with Stopwatch(1) as stopwatch, pytest.raises(ConfigError, match=r"this machine cannot be measured: .*mm"):
        stopwatch.kernels([bad])


def test_a_simulation_adds_what_was_clocked() -> None:
    events = (
        Kernel("mm", COMPUTE, 1e12, 1, "float32", call=0),
        Kernel("add", COMPUTE, 0.0, int(1e12), "float32"),  # not kept: a second at 1 TB/s
        Collective("all_reduce", "world", (0, 1), 8, COMPUTE, COMPUTE, "float32", 8),
        Kernel("mm", COMPUTE, 1e12, 1, "float32", call=1),
    )
    trace = Trace(0, 2, 1, (), events, calls=("first", "second"))
    clocked = Clocked((2.0, 4.0), {Exchange("all_reduce", (0, 1), 8, 8): 16.0}, overhead_s=0.5)
    assert Simulator(trace, ROUND, clocked=clocked).step_s(exact()) == pytest.approx(2 + 1 + 16 + 4 + 3 * 0.5)


def test_more_processes_than_can_be_measured_are_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"this machine has 16 processes .*, fewer than 1,536; take fewer with --gpus"),
        open_machine("this", num_gpus=1536, device="cpu"),
    ):
        pass
