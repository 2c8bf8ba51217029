"""A trace of a step whose parameters and gradients rest in host memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.tiny import SEQ_LEN, tiny_config

from amalthea.config.check import resolve
from amalthea.plan.accounting import account
from amalthea.plan.events import Allocate, Collective, Copy, Event, Free, HostMemory, Phase, Synchronize, Trace
from amalthea.plan.fits import memory_floor
from amalthea.plan.trace import trace_step
from amalthea.train.build import build
from amalthea.train.step import train_step

BIG: dict[str, Any] = {
    "precision": "bf16",
    "model__num_layers": 4,
    "memory__recompute": "block",
    "train__microbatch_sequences": 1,
    "train__global_batch_tokens": 2 * SEQ_LEN,
    "optim__experts": "muon",
}


def traced(num_ranks: int = 2, **overrides: Any) -> Trace:
    config = tiny_config(**BIG | overrides)
    return trace_step(config, rank=0, world_size=num_ranks, build=build, train_step=train_step)


def by_phase(trace: Trace) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    name = ""
    for event in trace.events:
        if isinstance(event, Phase):
            name = "backward" if event.name == "recompute" else event.name
        found.setdefault(name, []).append(event)
    return found


def copied(events: list[Event]) -> Counter[str]:
    """Bytes by direction, those of batches left out."""
    total: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Copy) and event.stream != "compute":
            total[event.direction] += event.num_bytes
    return total


def gradients_left(trace: Trace) -> int:
    """Bytes of gradients on the device when the optimizer's turn is."""
    alive: dict[int, int] = {}
    for event in trace.events:
        if isinstance(event, Phase) and event.name == "optimizer":
            break
        if isinstance(event, Allocate) and event.memory == "gradients":
            alive[event.block] = event.num_bytes
        elif isinstance(event, Free):
            alive.pop(event.block, None)
    return sum(alive.values())


@pytest.fixture(scope="module")
def resting() -> Trace:
    return traced(memory__offload_parameters=True)


def test_parameters_and_gradients_are_host_memory_and_nothing_else_changes(resting: Trace) -> None:
    plain = traced()
    parameters = sum(block.num_bytes for block in plain.resident if block.memory == "parameters")
    assert not [block for block in resting.resident if block.memory == "parameters"]
    assert sum(e.num_bytes for e in resting.events if isinstance(e, HostMemory)) == 2 * parameters
    held = [sum(b.num_bytes for b in t.resident if b.memory != "parameters") for t in (resting, plain)]
    assert held[0] == pytest.approx(held[1], abs=64 * 4), "moments lie in buckets"
    assert resting.peak_bytes(during="forward") <= plain.peak_bytes(during="forward") - parameters
    sent = [[event for event in trace.events if isinstance(event, Collective)] for trace in (resting, plain)]
    assert sent[0] == sent[1]
    assert gradients_left(plain) == parameters
    assert gradients_left(resting) == 0


def test_every_shard_comes_twice_and_every_gradient_leaves_once(resting: Trace) -> None:
    phases = by_phase(resting)
    config = tiny_config(**BIG)
    shards = account(config.model, seq_len=SEQ_LEN).total_params * 4 // 2
    once = copied(phases["forward"])["to_device"]
    assert once == shards
    again = copied(phases["backward"])
    # The head, the last group and the root's own are kept from forward.
    counted = account(config.model, seq_len=SEQ_LEN)
    layer = (counted.total_params - 2 * 96 * 32 - 32) // config.model.num_layers
    kept = (96 * 32 + layer + 32) * 4 // 2
    assert again == {"to_device": shards - kept, "to_host": shards}
    # Norm, then step; weights come and go beside them.
    assert copied(phases["optimizer"]) == {"to_device": 3 * shards, "to_host": shards}
    assert sum(isinstance(event, Synchronize) for event in phases["backward"]) > 0


def test_gradients_that_are_added_on_the_host_are_waited_for_at_once() -> None:
    once, twice = (traced(memory__offload_parameters=True, train__global_batch_tokens=n * 2 * SEQ_LEN) for n in (1, 2))
    leaving = [copied(by_phase(trace)["backward"])["to_host"] for trace in (once, twice)]
    assert leaving[1] == 2 * leaving[0]
    allocated = [sum(e.num_bytes for e in t.events if isinstance(e, Allocate)) for t in (once, twice)]
    assert allocated[0] < allocated[1] < 3 * allocated[0]


@pytest.mark.parametrize(("num_ranks", "state"), [(1, False), (2, True)])
def test_the_bound_of_memory_is_below_it_and_host_memory_is_as_counted(num_ranks: int, state: bool) -> None:
    switches = {"memory__offload_parameters": True, "memory__offload_optimizer": state}
    trace = traced(num_ranks, **switches)
    config = tiny_config(**BIG | switches)
    floor = memory_floor(config, resolve(config, world_size=num_ranks))
    assert floor.parameters == floor.gradients == 0
    assert floor.gathered > 0
    assert 0.05 * trace.peak_bytes() < floor.device <= trace.peak_bytes()
    host = sum(event.num_bytes for event in trace.events if isinstance(event, HostMemory))
    assert host == pytest.approx(floor.host, rel=0.01)
