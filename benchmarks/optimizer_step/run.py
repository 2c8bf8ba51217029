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
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from counting import CollectiveCounter
from phases import Phases
from report import machine, phase_table, ratio_table, ratios, table
from sides import OURS, PEERS, SETTINGS, Ours, Side, make_sides
from torch.distributed.device_mesh import init_device_mesh
from workload import Exact, Workload

WARM_UP_ROUNDS = 1


@dataclass(frozen=True)
class Settings:
    """What all ranks are told."""

    workload: Workload
    num_ranks: int
    rounds: int
    torch_rounds: int
    peers: tuple[str, ...]
    peers_folder: str


def run_ranks(settings: Settings) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs all ranks and joins what they measured: the slowest's times, the most bytes, the worst cosine; phases."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(settings.num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, settings, os.path.join(folder, "store"), sender)
            processes.append(context.Process(target=_rank_main, args=arguments, daemon=True))
            processes[-1].start()
            sender.close()
            pipes.append(receiver)
        try:
            of_ranks = [pipe.recv() for pipe in pipes]
        except EOFError:
            sys.exit("a rank died; its message is above")
        for process in processes:
            process.join()
    rows = [_join_rows(list(of_side)) for of_side in zip(*(figures for figures, _ in of_ranks), strict=True)]
    return rows, _mean([phases for _, phases in of_ranks])


def _join_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": rows[0]["name"],
        "part": rows[0]["part"],
        "bytes_sent": max(row["bytes_sent"] for row in rows),
        "num_collectives": max(row["num_collectives"] for row in rows),
        "cosine": min(row["cosine"] for row in rows),
        "wall_s": [max(times) for times in zip(*(row["wall_s"] for row in rows), strict=True)],
        "cpu_s": [statistics.mean(times) for times in zip(*(row["cpu_s"] for row in rows), strict=True)],
    }


def _mean(trees: list[Any]) -> Any:
    """Of numbers in equal places; a rank without a phase spent no time in it."""
    if isinstance(trees[0], dict):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: _mean([tree.get(key, {"wall_s": 0.0, "cpu_s": 0.0}) for tree in trees]) for key in keys}
    return statistics.mean(trees)


def _rank_main(rank: int, settings: Settings, store: str, sender: Any) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path.append(settings.peers_folder)
    torch._inductor.config.compile_threads = 1  # muon-fsdp2 compiles; workers would take the other ranks' cores
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, settings.num_ranks), rank=rank, world_size=settings.num_ranks
    )
    mesh = init_device_mesh("cpu", (settings.num_ranks,), mesh_dim_names=("dp_shard",))
    sides = make_sides(
        settings.workload,
        mesh,
        chosen=settings.peers,
        rounds=settings.rounds,
        torch_rounds=settings.torch_rounds,
    )
    _check(sides, Exact(settings.workload, rank=rank, num_ranks=settings.num_ranks))
    _measure(sides, rounds=settings.rounds)
    phases = {side.part: _profile(side, rounds=settings.rounds) for side in sides if side.name == OURS}
    sender.send(([side.figures for side in sides], phases))
    dist.barrier()
    dist.destroy_process_group()


def _check(sides: list[Side], exact: Exact) -> None:
    """Each side's first step: what it sends, and how near it comes to the exact update.

    Not compiled, where a side compiles: a compiled function and a dispatch mode don't go together.
    """
    for side in sides:
        _say(f"{side.name}, {side.part}: first step, counted and checked")
        with torch.compiler.set_stance("force_eager"), CollectiveCounter() as counter:
            side.step()
        side.bytes_sent, side.num_collectives = counter.bytes_sent, counter.num_collectives
        side.cosine = exact.worst_cosine(side.tensors, lr=SETTINGS["lr"], weight_decay=SETTINGS["weight_decay"])


def _measure(sides: list[Side], *, rounds: int) -> None:
    for number in range(-WARM_UP_ROUNDS, rounds):
        for side in sides:
            if number < 0 and not side.is_slow:
                _timed_step(side)
            elif 0 <= number < side.max_rounds:
                wall, cpu = _timed_step(side)
                side.wall_s.append(wall)
                side.cpu_s.append(cpu)
        _say(f"round {number + 1} of {rounds}")


def _timed_step(side: Side) -> tuple[float, float]:
    side.tensors.restore_gradients()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    side.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def _profile(side: Side, *, rounds: int) -> dict[str, dict[str, float]]:
    assert isinstance(side.step, Ours)
    assert side.step.optimizers.muon is not None
    with Phases(side.step.optimizers.muon) as phases:
        wall, cpu = (sum(times) for times in zip(*(_timed_step(side) for _ in range(rounds)), strict=True))
    by_phase = {
        phase: {"wall_s": phases.wall_s[phase] / rounds, "cpu_s": phases.cpu_s[phase] / rounds}
        for phase in phases.wall_s
    }
    # The processor's includes gloo's threads.
    return {**by_phase, "whole step": {"wall_s": wall / rounds, "cpu_s": cpu / rounds}}


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Muon's step on gloo ranks: ours against its peers.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--torch-rounds", type=int, default=1, help="of torch.optim.Muon, which takes half a minute")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; or none")
    parser.add_argument("--peers-folder", type=Path, help="where peers are or get installed; a temporary one")
    for key, value in asdict(Workload()).items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    arguments.peers = () if arguments.peers == "none" else tuple(arguments.peers.split(","))
    if unknown := set(arguments.peers) - set(PEERS):
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    return arguments


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="peers_") as folder:
        settings = Settings(
            workload=Workload(**{key: getattr(arguments, key) for key in asdict(Workload())}),
            num_ranks=arguments.ranks,
            rounds=arguments.rounds,
            torch_rounds=arguments.torch_rounds,
            peers=arguments.peers,
            peers_folder=str(arguments.peers_folder or folder),
        )
        if {"torchtitan", "muon-fsdp2"} & set(settings.peers):
            peers.install(Path(settings.peers_folder))
        facts = machine(settings.peers_folder)
        rows, phases = run_ranks(settings)
    found = ratios(rows)
    if arguments.json:
        result = {
            "machine": facts,
            "settings": {**asdict(settings), "muon": SETTINGS},
            "rows": rows,
            "ratios": found,
            "phases": phases,
            "peers_not_had": peers.NOT_HAD,
        }
        del result["settings"]["peers_folder"]
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts), table(rows), ratio_table(found), phase_table(phases), sep="\n\n")
    for name, reason in peers.NOT_HAD.items():
        print(f"\nNot measured: {name}, {reason}.")


if __name__ == "__main__":
    main()
