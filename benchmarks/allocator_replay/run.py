"""The allocator model of the planner against a recorded memory history of a real GPU.

    python benchmarks/allocator_replay/run.py --record HISTORY.json [--recipe moe-small] [--steps 3]     needs a GPU
    python benchmarks/allocator_replay/run.py HISTORY.json [--json FILE]                                 needs none

Recording runs training steps of a recipe in one process and writes what PyTorch's allocator did: each allocation,
free and segment, with its stream. Comparing hands the same requests to the model, in the same order, and sets its
reserved bytes beside the recorded ones at each event. Histories are JSON; a pickled snapshot is not read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import AmaltheaError, DataError
from amalthea.core.units import format_bytes
from amalthea.core.world import World
from amalthea.data.batch import Batch
from amalthea.plan.allocator_pools import AllocatorSettings, Block, CachingAllocator
from amalthea.recipes.registry import load_recipe
from amalthea.train.build import build
from amalthea.train.step import train_step

MAX_ENTRIES = 5_000_000
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_IGNORED = ("free_requested", "snapshot")


@dataclass(frozen=True)
class Entry:
    """One thing that the allocator did."""

    action: str
    address: int
    num_bytes: int
    stream: str


@dataclass(frozen=True)
class History:
    """What one device's allocator did since it was made, and its own statistics at the end where these are known."""

    entries: tuple[Entry, ...]
    expandable_segments: bool
    peak_allocated_bytes: int | None
    num_retries: int | None


@dataclass(frozen=True)
class Comparison:
    """Bytes of the model beside those recorded. An error is a fraction of what was recorded."""

    num_requests: int
    num_left_out: int
    """Entries after the device was first given memory back: from there on the model, without a cap, is another."""
    num_unknown_frees: int
    """Of blocks from before the history."""
    recorded_peak_reserved_bytes: int
    replayed_peak_reserved_bytes: int
    recorded_peak_allocated_bytes: int | None
    replayed_peak_allocated_bytes: int
    largest_reserved_error: float
    """At any request."""
    mean_reserved_error: float
    recorded_segments: int
    replayed_segments: int

    @property
    def peak_reserved_error(self) -> float:
        return self.replayed_peak_reserved_bytes / self.recorded_peak_reserved_bytes - 1

    @property
    def peak_allocated_error(self) -> float | None:
        recorded = self.recorded_peak_allocated_bytes
        return None if recorded is None else self.replayed_peak_allocated_bytes / recorded - 1


def read_history(path: Path) -> History:
    """Reads a history. Raises DataError where it is no such file, has several devices at work, or graphs' pools."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        traces = [trace for trace in content["device_traces"] if trace]
        entries = [_entry(raw) for trace in traces for raw in trace]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no memory history ({error}); make one with --record on a GPU") from error
    if len(traces) != 1:
        raise DataError(f"{path} has histories of {len(traces)} devices; record a process that uses one")
    if any(tuple(raw.get("pool_id", (0, 0))) != (0, 0) for raw in traces[0]):
        raise DataError(f"{path} has allocations of CUDA graphs' own pools, which the model does not know")
    stats = content.get("stats", {})
    return History(
        entries=tuple(entries),
        expandable_segments=any(entry.action == "segment_map" for entry in entries),
        peak_allocated_bytes=stats.get("allocated_bytes.all.peak"),
        num_retries=stats.get("num_alloc_retries"),
    )


def _entry(raw: dict[str, Any]) -> Entry:
    return Entry(str(raw["action"]), int(raw.get("addr", 0)), int(raw["size"]), str(raw.get("stream", 0)))


def compare(history: History) -> Comparison:
    """Replays a history. Raises DataError for an action that is not known, or a history without requests."""
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=history.expandable_segments))
    live: dict[int, Block] = {}
    reserved = peak = highest = segments = unknown = index = 0
    errors: list[float] = []
    for index, entry in enumerate(history.entries):
        sign = _SEGMENTS.get(entry.action)
        if sign is not None and sign < 0:
            break
        if sign is not None:
            reserved, segments = reserved + entry.num_bytes, segments + 1
        elif entry.action == "alloc":
            block = allocator.allocate(entry.num_bytes, entry.stream)
            assert block is not None, "there is no cap"
            live[entry.address] = block
            highest = max(highest, allocator.allocated)
            errors.append(abs(allocator.reserved - reserved) / reserved if reserved else 0.0)
            peak = max(peak, reserved)
        elif entry.action == "free_completed":
            if entry.address in live:
                allocator.release(live.pop(entry.address))
            else:
                unknown += 1
        elif entry.action not in _IGNORED:
            raise DataError(f"entry {index} is {entry.action!r}, of which the comparison knows nothing")
    else:
        index += 1
    if not peak:
        raise DataError("the history has no allocation in a segment of its own; record from the start of the process")
    left_out = len(history.entries) - index
    return Comparison(
        num_requests=len(errors),
        num_left_out=left_out,
        num_unknown_frees=unknown,
        recorded_peak_reserved_bytes=peak,
        # Without a cap nothing goes back, so what is reserved at the end is the peak.
        replayed_peak_reserved_bytes=allocator.reserved,
        recorded_peak_allocated_bytes=None if left_out else history.peak_allocated_bytes,
        replayed_peak_allocated_bytes=highest,
        largest_reserved_error=max(errors),
        mean_reserved_error=sum(errors) / len(errors),
        recorded_segments=segments,
        replayed_segments=allocator.num_device_allocations,
    )


def training_steps(config: RunConfig, device: str) -> Callable[[int], float]:
    """A function that takes the number of a step and trains once, as one process of a run; returns the loss."""
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    # One microbatch a step is enough: more are the same again.
    sequences = config.train.microbatch_sequences * config.memory.sequences_per_gather
    train = config.train.model_copy(update={"global_batch_tokens": sequences * config.data.seq_len})
    config = config.model_copy(update={"train": train})
    world = World(device="cuda" if device == "cuda" else "cpu")
    run = build(config, resolve(config, world_size=1), world)

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        shape = (sequences, config.data.seq_len)
        tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
        lengths = tuple((shape[1],) for _ in range(sequences))
        batch = Batch(tokens, tokens.roll(-1, dims=1), lengths, ("xx",) * sequences)
        return train_step(run, [batch], lr_factor=1.0, tallies=()).loss

    return step


def record(path: Path, config: RunConfig, *, num_steps: int) -> None:
    """Trains on the GPU and writes what its allocator did, from the first allocation on."""
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=MAX_ENTRIES)
    step = training_steps(config, "cuda")
    for number in range(num_steps):
        print(f"step {number + 1} of {num_steps}: loss {step(number):.3f}", file=sys.stderr)
    torch.cuda.synchronize()
    snapshot: Any = torch.cuda.memory._snapshot()
    traces = [[_slim(raw) for raw in trace] for trace in snapshot["device_traces"]]
    if any(len(trace) >= MAX_ENTRIES for trace in traces):
        raise DataError(f"more than {MAX_ENTRIES:,} entries; record fewer --steps")
    content = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "recipe": config.recipe,
        "stats": {name: value for name, value in torch.cuda.memory_stats().items() if isinstance(value, int)},
        "device_traces": traces,
    }
    path.write_text(json.dumps(content), encoding="utf-8")


def _slim(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: raw[name] for name in ("action", "addr", "size", "stream", "pool_id") if name in raw}


def _lines(found: Comparison, history: History) -> Iterator[str]:
    kind = "expandable segments" if history.expandable_segments else "ordinary segments"
    yield f"{found.num_requests:,} requests, {kind}, {history.num_retries or 0} retries recorded"
    if found.num_left_out:
        yield f"{found.num_left_out:,} entries left out: from there on memory had been given back to the device"
    if found.num_unknown_frees:
        yield f"{found.num_unknown_frees:,} frees of blocks from before the history: record from the process's start"
    yield (
        f"peak reserved: recorded {format_bytes(found.recorded_peak_reserved_bytes)}, replayed "
        f"{format_bytes(found.replayed_peak_reserved_bytes)} ({found.peak_reserved_error:+.2%})"
    )
    allocated, error = found.recorded_peak_allocated_bytes, found.peak_allocated_error
    recorded = "not known" if allocated is None else format_bytes(allocated)
    yield (
        f"peak allocated: recorded {recorded}, replayed {format_bytes(found.replayed_peak_allocated_bytes)}"
        + ("" if error is None else f" ({error:+.2%})")
    )
    largest, mean = found.largest_reserved_error, found.mean_reserved_error
    yield f"reserved at any request: off by {largest:.2%} at most, {mean:.2%} on average"
    segments = f"recorded {found.recorded_segments:,}, replayed {found.replayed_segments:,}"
    yield f"segments or maps asked of the device: {segments}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("history", type=Path, help="a history to compare, or to write with --record")
    parser.add_argument("--record", action="store_true", help="train on this machine's GPU and write its history")
    parser.add_argument("--recipe", default="moe-small")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def main() -> None:
    options = _arguments()
    try:
        if options.record:
            if not torch.cuda.is_available():
                raise DataError(
                    "--record needs a CUDA GPU, and this machine has none; compare a history made elsewhere"
                )
            record(options.history, load_recipe(options.recipe), num_steps=options.steps)
            return
        history = read_history(options.history)
        found = compare(history)
    except AmaltheaError as error:
        sys.exit(str(error))
    print("\n".join(_lines(found, history)))
    if options.json is not None:
        errors = {"peak_reserved_error": found.peak_reserved_error, "peak_allocated_error": found.peak_allocated_error}
        options.json.write_text(json.dumps(asdict(found) | errors, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
