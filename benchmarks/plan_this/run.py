"""`amalthea plan --cluster this` against steps that really run here: seconds and bytes of tensors.

    python benchmarks/plan_this/run.py [--shapes quickstart,deep,wide,long] [--ranks 1,2,4] [--rounds 3]
        [--steps 9] [--json FILE]

Every shape trains on random tokens with as many gloo processes; in turns with that, the plan measures single operations
and collectives and simulates the same step. The real routing's load of each expert goes
into the plan, as with `--expert-load`. A step's time is the slowest rank's, the median of the steps after two that warm
up; tensor bytes are the peak of live storages in a step apart, which is tracked.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from amalthea.config.check import resolve
from amalthea.config.overrides import apply_overrides
from amalthea.config.run import RunConfig
from amalthea.core.libc import keep_freed_memory
from amalthea.core.world import World
from amalthea.data.batch import Batch
from amalthea.memory.tracker import StorageTracker
from amalthea.plan.machine import open_machine
from amalthea.plan.setting import Code, Setting
from amalthea.plan.trace import Workload
from amalthea.recipes.quickstart import quickstart
from amalthea.train.build import Run, build
from amalthea.train.step import train_step

WARM_UP_STEPS = 2
SHAPES: dict[str, tuple[str, ...]] = {
    "tiny": ("model.num_layers=1", "data.seq_len=64", "train.global_batch_tokens=512"),
    "quickstart": (),
    "deep": ("model.num_layers=12", "model.hidden_size=128", "data.seq_len=256", "train.global_batch_tokens=2048"),
    "wide": (
        "model.num_layers=2",
        "model.hidden_size=512",
        "model.moe.expert_hidden_size=384",
    ),
    "long": ("data.seq_len=1024", "train.global_batch_tokens=8192", "memory.recompute=block"),
}
LAYOUTS: dict[int, tuple[str, ...]] = {1: (), 2: (), 4: ("parallel.ep=2",)}


@dataclass
class Row:
    """Seconds and bytes of one shape; ratios are predicted over measured."""

    shape: str
    ranks: int
    measured_s: float
    predicted_s: float
    measured_bytes: int
    predicted_bytes: int
    measuring_s: float

    @property
    def time_ratio(self) -> float:
        return self.predicted_s / self.measured_s

    @property
    def bytes_ratio(self) -> float:
        return self.predicted_bytes / self.measured_bytes


@dataclass(frozen=True)
class Measured:
    """By one rank."""

    step_s: list[float]
    peak_bytes: int
    expert_counts: list[int]


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    options = _parser().parse_args(arguments)
    rows = []
    for shape in options.shapes.split(","):
        for ranks in map(int, options.ranks.split(",")):
            config = shape_config(shape, ranks)
            rows.append(compare(shape, config, ranks, steps=options.steps, rounds=options.rounds))
            row = rows[-1]
            print(
                f"| {row.shape} | {row.ranks} | {row.measured_s * 1e3:,.0f} | {row.predicted_s * 1e3:,.0f} "
                f"| **{row.time_ratio:.2f}** | {row.measured_bytes / 2**20:,.1f} | {row.bytes_ratio:.4f} "
                f"| {row.measuring_s:.0f} |",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="quickstart,deep,wide,long", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser


def shape_config(shape: str, ranks: int) -> RunConfig:
    return apply_overrides(quickstart(), (*SHAPES[shape], *LAYOUTS[ranks], "device=cpu"))


def compare(shape: str, config: RunConfig, ranks: int, *, steps: int, rounds: int) -> Row:
    """Turns of real steps and of measured operations, since a shared machine is not equally fast at all times."""
    real, plans = [], []
    for _ in range(rounds):
        real.append(run_ranks(config, ranks, steps))
        plans.append(plan(config, ranks, expert_load=real[0][0].expert_counts))
    slowest = [max(times) for turn in real for times in zip(*(one.step_s for one in turn), strict=True)]
    return Row(
        shape=shape,
        ranks=ranks,
        measured_s=statistics.median(slowest),
        predicted_s=statistics.median(one.step_s for one in plans),
        measured_bytes=real[0][0].peak_bytes,
        predicted_bytes=plans[0].tensor_bytes,
        measuring_s=statistics.median(one.measuring_s for one in plans),
    )


@dataclass(frozen=True)
class Plan:
    step_s: float
    tensor_bytes: int
    measuring_s: float


def plan(config: RunConfig, ranks: int, *, expert_load: list[int]) -> Plan:
    began = time.perf_counter()
    with open_machine("this", num_gpus=ranks, device="cpu", threads=_threads(ranks)) as machine:
        setting = Setting(
            cluster=machine.cluster,
            num_gpus=ranks,
            workload=Workload(expert_load=tuple(map(float, expert_load))),
            assumptions=machine.assumptions,
            stopwatch=machine.stopwatch,
        )
        trace = setting.trace(config, Code(build, train_step))
        timeline = setting.simulator(trace).timeline(setting.assumptions)
    return Plan(timeline.step_s, trace.peak_bytes(), time.perf_counter() - began)


def run_ranks(config: RunConfig, ranks: int, steps: int) -> list[Measured]:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks)
            arguments = (config, world, os.path.join(folder, "store"), steps, theirs)
            processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            found = [pipe.recv() for pipe in pipes]
        except EOFError:
            sys.exit("a rank died; its message is above")
        for process in processes:
            process.join()
    return found


def _threads(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _rank(config: RunConfig, world: World, store: str, steps: int, answer: Connection) -> None:
    torch.set_num_threads(_threads(world.size))
    keep_freed_memory()
    dist.init_process_group("gloo", store=dist.FileStore(store, world.size), rank=world.rank, world_size=world.size)
    run = build(config, resolve(config, world_size=world.size), world)
    times, counts = [], torch.zeros(config.model.moe.num_experts, dtype=torch.int64)
    for number in range(WARM_UP_STEPS + steps):
        batches = microbatches(run, number)
        dist.barrier()
        began = time.perf_counter()
        result = train_step(run, batches, lr_factor=1.0, tallies=())
        times.append(time.perf_counter() - began)
        counts += torch.tensor(result.expert_counts).sum(0)
    answer.send(Measured(times[WARM_UP_STEPS:], tracked_bytes(config, world), counts.tolist()))
    dist.barrier()
    dist.destroy_process_group()


def tracked_bytes(config: RunConfig, world: World) -> int:
    """The least peak of three steps: gloo's threads sometimes hold a tensor longer than its last user."""
    peaks = []
    with StorageTracker() as tracker:
        run = build(config, resolve(config, world_size=world.size), world)
        for number in range(4):
            batches = microbatches(run, number)
            gc.collect()
            tracker.reset_peak()
            train_step(run, batches, lr_factor=1.0, tallies=())
            peaks.append(tracker.peak_bytes)
    return min(peaks[1:])


def microbatches(run: Run, number: int) -> list[Batch]:
    """Random tokens, one document to a sequence."""
    config, resolved = run.config, run.resolved
    rank_of_data = run.world.rank // resolved.cp
    generator = torch.Generator().manual_seed(1000 * number + rank_of_data)
    found = []
    for _ in range(resolved.accumulation_steps):
        shape = (resolved.gather_sequences, config.data.seq_len)
        tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
        lengths = ((config.data.seq_len,),) * shape[0]
        found.append(Batch(tokens, tokens.roll(-1, dims=1), lengths, ("xx",) * shape[0]))
    return found


if __name__ == "__main__":
    main()
