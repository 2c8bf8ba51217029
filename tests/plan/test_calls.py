"""Calls that are kept from a trace, and called again on real memory."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from support.tiny import tiny_config

from amalthea.plan.trace import Workload, trace_step
from amalthea.plan.trace.calls import Call, CallBook, FormatSpec, materialize
from amalthea.train.build import build
from amalthea.train.step import train_step

CPU = torch.device("cpu")
ATEN = torch.ops.aten
MUON: dict[str, Any] = {"optim__experts": "muon", "optim__matrices": "muon"}
TRACES: dict[str, tuple[int, dict[str, Any], int | None]] = {
    "1 rank, muon, documents": (1, MUON, 5),
    "1 rank, adamw, clipped logits": (
        1,
        {"optim__qk_clip": 10.0, "model__qk_norm": False, "memory__recompute": "block"},
        None,
    ),
    "4 ranks, hsdp-ep2, bf16": (
        4,
        MUON
        | {"parallel__ep": 2, "parallel__dp_replicate": 2, "precision": "bf16", "model__vocab_size": 97}
        | {"data__tokenizer__vocab_size": 97},
        None,
    ),
    "4 ranks, by node, cp2": (
        4,
        {"parallel__ep": 4, "parallel__cp": 2, "parallel__dispatch": "hierarchical", "parallel__ranks_per_node": 2},
        7,
    ),
}


def call(function: Any, *args: Any, **kwargs: Any) -> Call:
    book = CallBook()
    book.number(function, args, kwargs)
    return book.calls[0]


def test_a_call_travels_between_processes_and_names_nothing_of_this_one() -> None:
    copied = call(ATEN.clone.default, torch.ones(2, 3).t(), memory_format=torch.contiguous_format)
    assert copied.kwargs == (("memory_format", FormatSpec("contiguous_format")),)
    there = pickle.loads(pickle.dumps(copied))
    assert there == copied
    out = materialize(there, device=CPU).run()
    assert isinstance(out, torch.Tensor)
    assert out.is_contiguous()


@pytest.mark.parametrize("name", TRACES)
def test_every_operation_of_a_step_runs_again_and_gives_the_same_shapes(name: str) -> None:
    num_ranks, chosen, document_tokens = TRACES[name]
    trace = trace_step(
        tiny_config(**chosen),
        rank=0,
        world_size=num_ranks,
        build=build,
        train_step=train_step,
        workload=Workload(document_tokens=document_tokens),
        gpu=False,
        keep_calls=True,
    )
    assert len(trace.calls) > 100
    kernels = [event.call for event in trace.events if hasattr(event, "call")]
    assert set(kernels) <= set(range(len(trace.calls)))
    for one in trace.calls:
        ready = materialize(one, device=CPU)
        ready.run()
        ready.run()


def test_same_shapes_are_one_call_and_others_are_not() -> None:
    book = CallBook()
    x, y = torch.zeros(4, 6), torch.zeros(4, 6)

    def number(function: Any, *args: Any, **kwargs: Any) -> int:
        return book.number(function, args, kwargs)

    first = number(ATEN.add.Tensor, x, y)
    assert number(ATEN.add.Tensor, y, x) == first
    assert number(ATEN.add.Tensor, x, x) != first  # one memory instead of two
    assert number(ATEN.add.Tensor, x, y.double()) != first
    assert number(ATEN.add.Tensor, x, torch.zeros(6, 4).T) != first
    assert number(ATEN.sub.Tensor, x, y) != first
    scaled = number(ATEN.mul.Scalar, x, 0.5)
    assert number(ATEN.mul.Scalar, x, 0.25) == scaled
    assert number(ATEN.sum.dim_IntList, x, [0]) != number(ATEN.sum.dim_IntList, x, [1])


def test_places_in_one_buffer_are_kept_relative_to_each_other() -> None:
    buffer = torch.arange(1000.0)
    left, right = buffer[500:512].view(3, 4), buffer[506:518].view(3, 4)
    assert call(ATEN.add.Tensor, left, right) == call(ATEN.add.Tensor, buffer[:12].view(3, 4), buffer[6:18].view(3, 4))
    assert call(ATEN.add.Tensor, left, right) != call(ATEN.add.Tensor, left, buffer[512:524].view(3, 4))


def test_indices_are_valid_and_offsets_cut_all_rows() -> None:
    tokens = torch.zeros(50, dtype=torch.int64)
    rows = materialize(call(ATEN.embedding.default, torch.zeros(7, 3), tokens), device=CPU).run()
    assert isinstance(rows, torch.Tensor)
    assert rows.shape == (50, 3)
    left, right = torch.zeros(64, 16), torch.zeros(4, 16, 32)
    offsets = torch.zeros(4, dtype=torch.int32)
    out = materialize(call(ATEN._grouped_mm.default, left, right, offsets), device=CPU).run()
    assert isinstance(out, torch.Tensor)
    # Every row is a product of values near 1, so none was left out.
    assert out.shape == (64, 32)
    assert bool((out > 1).all())


def test_what_is_changed_is_put_back() -> None:
    ready = materialize(call(ATEN.exp_.default, torch.zeros(8)), device=CPU)
    assert ready.refill is not None
    for _ in range(5):
        ready.refill()
        found = ready.run()
    assert isinstance(found, torch.Tensor)
    assert float(found.max()) < 5  # e to the 1.5th
    assert materialize(call(ATEN.exp.default, torch.zeros(8)), device=CPU).refill is None
    assert materialize(call(ATEN.copy_.default, torch.zeros(8), torch.zeros(8)), device=CPU).refill is None
