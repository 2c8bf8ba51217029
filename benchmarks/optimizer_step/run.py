"""One optimizer step of Muon on several gloo ranks: ours against its peers, interleaved in the same processes.

    python benchmarks/optimizer_step/run.py [--rounds 9] [--peers torchtitan,muon-fsdp2,torch] [--json FILE]

A *round* is one step of every side, each between barriers and on gradients laid anew; its time is the slowest rank's.
Sides take the same weights, gradients and settings. Peers come from PyPI into a folder of their own.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing as mp
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from counting import CollectiveCounter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from workload import Exact, Part, Source, Tensors, Workload

from amalthea.flexshard.layout import Grid
from amalthea.optim.build import Optimizers, Place
from amalthea.optim.config import MuonConfig, OptimConfig

SETTINGS: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "nesterov": True, "ns_steps": 5}
"""Every side's; all use the quintic coefficients, which are the only ones that all have, and fp32 momentum."""

PARTS: tuple[Part, ...] = ("experts", "dense", "both")
WARM_UP_ROUNDS = 1
TARGET = 0.8


@dataclass
class Side:
    """One optimizer on one part; times in seconds, one a round."""

    name: str
    part: Part
    tensors: Tensors
    step: Callable[[], None]
    max_rounds: int
    is_slow: bool = False
    bytes_sent: float = 0.0
    num_collectives: int = 0
    cosine: float = 1.0
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """What all ranks are told."""

    workload: Workload
    num_ranks: int
    rounds: int
    torch_rounds: int
    peers: tuple[str, ...]
    peers_folder: str


def ours(tensors: Tensors, *, form: str) -> Callable[[], None]:
    """The trainer's optimizers, from FSDP's parameters, as a training step calls them."""
    muon = MuonConfig(
        lr=SETTINGS["lr"],
        momentum=SETTINGS["momentum"],
        nesterov=SETTINGS["nesterov"],
        weight_decay=SETTINGS["weight_decay"],
        num_steps=SETTINGS["ns_steps"],
        form=form,  # type: ignore[arg-type]
    )
    grid = Grid(1, dist.get_world_size())
    place = Place(grid=grid, rank=dist.get_rank(), shard_group=dist.group.WORLD, all_ranks=dist.group.WORLD)
    optimizers = Optimizers(tensors.parameters.items(), OptimConfig(muon=muon), place=place)

    def step() -> None:
        optimizers.reduce_over_replicas()
        optimizers.step(lr_factor=1.0)

    return step


def make_sides(settings: Settings, mesh: DeviceMesh) -> list[Side]:
    builders: dict[str, Callable[[Tensors], Callable[[], None]]] = {
        "ours": partial(ours, form="standard"),
        "ours, Gram form": partial(ours, form="gram"),
    }
    if "torchtitan" in settings.peers:
        for title, size in (("TorchTitan build_dist_muon", 2), ("TorchTitan, one bucket", 0)):
            builders[title] = partial(peers.torchtitan, settings=SETTINGS, layers_per_bucket=size)
    if "muon-fsdp2" in settings.peers:
        builders["muon-fsdp2"] = partial(peers.muon_fsdp2, settings=SETTINGS)
    source = Source(settings.workload, mesh)
    sides = []
    for part in PARTS:
        for name, build in builders.items():
            tensors = source.make(part)
            sides.append(Side(name, part, tensors, build(tensors), settings.rounds))
    if "torch" in settings.peers:
        for part in PARTS[:2]:
            tensors = source.make(part, cut_stacks=True)
            sides.append(
                Side("torch.optim.Muon", part, tensors, peers.torch_muon(tensors, SETTINGS), settings.torch_rounds, True)
            )
    return sides


def measure(settings: Settings, mesh: DeviceMesh) -> list[Side]:
    """All sides of this rank, with their figures."""
    rank = dist.get_rank()
    exact = Exact(settings.workload, rank=rank, num_ranks=settings.num_ranks)
    sides = make_sides(settings, mesh)
    for side in sides:
        _say(rank, f"{side.name}, {side.part}: first steps")
        side.step()
        side.cosine = exact.worst_cosine(side.tensors, lr=SETTINGS["lr"], weight_decay=SETTINGS["weight_decay"])
        # A compiled function and a dispatch mode don't go together, and what is sent does not depend on compiling.
        with torch.compiler.set_stance("force_eager"), CollectiveCounter() as counter:
            side.step()
        side.bytes_sent, side.num_collectives = counter.bytes_sent, counter.num_collectives
    for number in range(-WARM_UP_ROUNDS, settings.rounds):
        for side in sides:
            is_warm_up = number < 0
            if number < side.max_rounds and not (is_warm_up and side.is_slow):
                wall, cpu = _timed_step(side)
                if not is_warm_up:
                    side.wall_s.append(wall)
                    side.cpu_s.append(cpu)
        _say(rank, f"round {number + 1} of {settings.rounds}")
    return sides


def _timed_step(side: Side) -> tuple[float, float]:
    side.tensors.restore_gradients()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    side.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def rank_main(rank: int, settings: Settings, store: str, results: Any) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path.append(settings.peers_folder)
    torch._inductor.config.compile_threads = 1  # muon-fsdp2 compiles; workers would take the other ranks' cores
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, settings.num_ranks), rank=rank, world_size=settings.num_ranks
    )
    mesh = init_device_mesh("cpu", (settings.num_ranks,), mesh_dim_names=("dp_shard",))
    sides = measure(settings, mesh)
    results.put(
        (
            rank,
            [
                {
                    "name": side.name,
                    "part": side.part,
                    "bytes_sent": side.bytes_sent,
                    "num_collectives": side.num_collectives,
                    "cosine": side.cosine,
                    "wall_s": side.wall_s,
                    "cpu_s": side.cpu_s,
                }
                for side in sides
            ],
        )
    )
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(settings: Settings) -> list[dict[str, Any]]:
    """Runs all ranks and joins what they measured: the slowest's times, the most bytes, the worst cosine."""
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=rank_main, args=(rank, settings, store, results), daemon=True)
            for rank in range(settings.num_ranks)
        ]
        for process in processes:
            process.start()
        by_rank: dict[int, list[dict[str, Any]]] = {}
        while len(by_rank) < settings.num_ranks:
            while results.empty():
                dead = [process for process in processes if process.exitcode not in (None, 0)]
                if dead:
                    sys.exit("a rank died; its message is above")
                time.sleep(0.05)
            rank, rows = results.get()
            by_rank[rank] = rows
        for process in processes:
            process.join()
    joined = []
    for rows in zip(*by_rank.values(), strict=True):
        row = dict(rows[0])
        row["wall_s"] = [max(times) for times in zip(*(r["wall_s"] for r in rows), strict=True)]
        row["cpu_s"] = [statistics.mean(times) for times in zip(*(r["cpu_s"] for r in rows), strict=True)]
        row["bytes_sent"] = max(r["bytes_sent"] for r in rows)
        row["num_collectives"] = max(r["num_collectives"] for r in rows)
        row["cosine"] = min(r["cosine"] for r in rows)
        joined.append(row)
    return joined


def ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ours over the best peer, round by round; a peer is best by its median."""
    times: dict[tuple[str, str], list[float]] = {(row["name"], row["part"]): row["wall_s"] for row in rows}
    names = [name for name in dict.fromkeys(name for name, _ in times) if not name.startswith(("ours", "torch."))]
    if not names:
        return {}

    def best(*parts: str) -> str:
        return min(names, key=lambda name: sum(statistics.median(times[name, part]) for part in parts))

    def over(form: str, peers_of_parts: dict[str, str]) -> dict[str, Any]:
        mine = [times[form, part] for part in peers_of_parts]
        theirs = [times[name, part] for part, name in peers_of_parts.items()]
        per_round = [sum(a) / sum(b) for a, b in zip(zip(*mine), zip(*theirs))]
        return {**_spread(per_round), "peers": peers_of_parts}

    found = {}
    for form in ("ours", "ours, Gram form"):
        found[form] = {
            "both parts, best peer": over(form, dict.fromkeys(("experts", "dense"), best("experts", "dense"))),
            "both parts, best peer of each": over(form, {part: best(part) for part in ("experts", "dense")}),
            "both parts in one step, best peer": over(form, {"both": best("both")}),
        }
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of the slowest rank (median, least, most), MB sent by the rank that sends most, collectives."""
    lines = [
        "| side | part | ms (min–max) | processor ms per rank | MB sent | collectives | worst cosine | rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        wall, cpu = _spread(row["wall_s"]), _spread(row["cpu_s"])
        lines.append(
            f"| {row['name']} | {row['part']} | **{wall['median'] * 1e3:,.0f}** "
            f"({wall['min'] * 1e3:,.0f}–{wall['max'] * 1e3:,.0f}) | {cpu['median'] * 1e3:,.0f} "
            f"| {row['bytes_sent'] / 1e6:,.1f} | {row['num_collectives']:,} | {row['cosine']:.4f} "
            f"| {len(row['wall_s'])} |"
        )
    return "\n".join(lines)


def verdict(found: dict[str, Any]) -> str:
    lines = [f"| ours over peers (target {TARGET}) | ratio (min–max) | peers |", "|---|---|---|"]
    for form, by_way in found.items():
        for way, ratio in by_way.items():
            chosen = ", ".join(dict.fromkeys(ratio["peers"].values()))
            lines.append(
                f"| {form}: {way} | **{ratio['median']:.2f}** ({ratio['min']:.2f}–{ratio['max']:.2f}) | {chosen} |"
            )
    return "\n".join(lines)


def machine(settings: Settings) -> dict[str, Any]:
    cpus = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    found = metadata.distributions(path=[settings.peers_folder])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": models[0] if models else platform.processor(),
        "cores": len(models),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{distribution.metadata["Name"]: distribution.version for distribution in found},
    }


def _say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Muon's step on gloo ranks: ours against its peers.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--torch-rounds", type=int, default=1, help="of torch.optim.Muon, which takes half a minute")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--peers", default="torchtitan,muon-fsdp2,torch", help="of these, or none")
    parser.add_argument("--peers-folder", type=Path, help="where peers are, or get, installed; default: a temporary one")
    for key, value in asdict(Workload()).items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    chosen = () if arguments.peers == "none" else tuple(arguments.peers.split(","))
    if unknown := set(chosen) - {"torchtitan", "muon-fsdp2", "torch"}:
        parser.error(f"unknown peers {', '.join(sorted(unknown))}")

    with tempfile.TemporaryDirectory(prefix="peers_") as folder:
        settings = Settings(
            workload=Workload(**{key: getattr(arguments, key) for key in asdict(Workload())}),
            num_ranks=arguments.ranks,
            rounds=arguments.rounds,
            torch_rounds=arguments.torch_rounds,
            peers=chosen,
            peers_folder=str(arguments.peers_folder or folder),
        )
        if {"torchtitan", "muon-fsdp2"} & set(chosen):
            peers.install(Path(settings.peers_folder))
        facts = machine(settings)
        rows = run_ranks(settings)
    found = ratios(rows)
    if arguments.json:
        result = {
            "machine": facts,
            "settings": {**asdict(settings), "muon": SETTINGS},
            "rows": rows,
            "ratios": found,
            "peers_not_had": peers.NOT_HAD,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts))
    print(table(rows))
    if found:
        print(verdict(found))
    for name, reason in peers.NOT_HAD.items():
        print(f"Not measured: {name}, {reason}.")


if __name__ == "__main__":
    main()
