"""Tokens per second of one process: our training step against Hugging Face transformers, interleaved.

    python benchmarks/train_step/run.py [--sizes quickstart,middle,large] [--documents whole,packed] [--rounds 7]

Each side runs in a process of its own that sleeps while the other one works; a *turn* is a few steps of one side, a
*round* is one turn of each. Hugging Face's implementation of experts and attention is the fastest of those that it
has, measured first, for every row. A row is refused if the two sides don't compute the same: first loss, first
gradient norm, and the loss after two updates.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from sides import SIZES, Size, Step, gathered_bytes, hugging_face, ours

WARM_UP_STEPS = 3
LOSS_TOLERANCE, NORM_TOLERANCE, LATER_LOSS_TOLERANCE = 1e-4, 1e-3, 1e-3
PEERS = {"default": False, "same_allocator": True}
"""Hugging Face as users have it, and with the setting of the C library's allocator that our launcher makes."""
MAX_GATHERED_BYTES = 4 << 30
"""`batched_mm` is left out where the weights it would gather and keep exceed this."""


@dataclass(frozen=True)
class Turn:
    """Seconds by the clock and of processor time, and what the steps returned."""

    wall_s: float
    cpu_s: float
    losses: list[float]
    grad_norms: list[float]
    peak_bytes: int


class Side:
    """One side in its own process."""

    def __init__(self, name: str, make_step: Callable[[], Step], *, threads: int) -> None:
        # Forked, so that imports are paid once; nothing has run in parallel in this process yet.
        context = mp.get_context("fork")
        self.name, self._steps_done = name, 0
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make_step, threads), daemon=True)
        self._process.start()
        theirs.close()

    def turn(self, num_steps: int) -> Turn:
        self._connection.send((self._steps_done, num_steps))
        self._steps_done += num_steps
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            sys.exit(f"{self.name} died with exit code {self._process.exitcode}; its message is above")

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def _serve(connection: Connection, make_step: Callable[[], Step], threads: int) -> None:
    torch.set_num_threads(threads)
    step = make_step()
    while (request := connection.recv()) is not None:
        first, count = request
        wall, cpu = time.perf_counter(), time.process_time()
        results = [step(number) for number in range(first, first + count)]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        losses, norms = (list(column) for column in zip(*results, strict=True))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        connection.send(Turn(wall, cpu, losses, norms, peak))


def fastest_peer(size: Size, *, packed: bool, threads: int) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Times every implementation that Hugging Face offers on a CPU; returns the best and all of them."""
    tried: list[dict[str, Any]] = []
    for experts in ("eager", "grouped_mm", "batched_mm"):
        for attention in ("sdpa", "eager"):
            entry: dict[str, Any] = {"experts": experts, "attention": attention}
            tried.append(entry)
            if experts == "batched_mm" and gathered_bytes(size) > MAX_GATHERED_BYTES:
                entry["skipped"] = f"it would keep {gathered_bytes(size) / 2**30:.0f} GiB of gathered weights"
                continue
            make_step = partial(hugging_face, size, packed=packed, experts=experts, attention=attention)
            side = Side(f"Hugging Face ({experts}, {attention})", make_step, threads=threads)
            side.turn(1)
            turns = [side.turn(size.steps_per_turn) for _ in range(2)]
            side.close()
            entry["tokens_per_s"] = size.tokens * size.steps_per_turn / min(turn.wall_s for turn in turns)
            _say(f"  Hugging Face, experts {experts}, attention {attention}: {entry['tokens_per_s']:,.0f} tokens/s")
    best = max(tried, key=lambda entry: entry.get("tokens_per_s", 0.0))
    return {"experts": best["experts"], "attention": best["attention"]}, tried


def compare(size: Size, *, packed: bool, rounds: int, threads: int) -> dict[str, Any]:
    """One row of the table: ours against Hugging Face as users have it, and again with our allocator setting."""
    title = f"{size.name}, {'packed' if packed else 'whole'} documents"
    _say(f"{title}: choosing Hugging Face's implementation")
    implementation, tried = fastest_peer(size, packed=packed, threads=threads)
    mine = Side("ours", partial(ours, size, packed=packed), threads=threads)
    warm_up = mine.turn(WARM_UP_STEPS)
    row: dict[str, Any] = {
        "size": size.name,
        "documents": "packed" if packed else "whole",
        "tokens_per_step": size.tokens,
        "peer": implementation,
        "peer_candidates": tried,
    }
    for key, keeps_memory in PEERS.items():
        make_step = partial(hugging_face, size, packed=packed, **implementation, keeps_memory=keeps_memory)
        theirs = Side(f"Hugging Face ({key})", make_step, threads=threads)
        row["agreement"] = check_same_work(warm_up, theirs.turn(WARM_UP_STEPS))
        _say(f"{title}: {json.dumps(row['agreement'])}")
        row[key] = _rounds(f"{title}, {key}", mine, theirs, size, rounds)
        theirs.close()
    mine.close()
    return row


def _rounds(title: str, mine: Side, theirs: Side, size: Size, rounds: int) -> dict[str, Any]:
    """Turns of both sides, one after the other, and their spread."""
    tokens = size.tokens * size.steps_per_turn
    pairs: list[tuple[Turn, Turn]] = []
    for number in range(rounds):
        a, b = mine.turn(size.steps_per_turn), theirs.turn(size.steps_per_turn)
        pairs.append((a, b))
        speeds = f"ours {tokens / a.wall_s:,.0f}, Hugging Face {tokens / b.wall_s:,.0f} tokens/s"
        _say(f"{title}: round {number + 1} of {rounds}: {speeds}, ratio {b.wall_s / a.wall_s:.2f}")
    return {
        "ours_tokens_per_s": _spread([tokens / a.wall_s for a, _ in pairs]),
        "peer_tokens_per_s": _spread([tokens / b.wall_s for _, b in pairs]),
        "ratio": _spread([b.wall_s / a.wall_s for a, b in pairs]),
        "cpu_time_ratio": _spread([b.cpu_s / a.cpu_s for a, b in pairs]),
        "ours_peak_gib": pairs[-1][0].peak_bytes / 2**30,
        "peer_peak_gib": pairs[-1][1].peak_bytes / 2**30,
        "turns": [[asdict(turn) for turn in pair] for pair in pairs],
    }


def check_same_work(mine: Turn, theirs: Turn) -> dict[str, float]:
    """Ends the program unless both sides had the same losses and gradient norm in their first steps."""
    pairs = {
        "first_loss": (mine.losses[0], theirs.losses[0], LOSS_TOLERANCE),
        "first_grad_norm": (mine.grad_norms[0], theirs.grad_norms[0], NORM_TOLERANCE),
        "later_loss": (mine.losses[-1], theirs.losses[-1], LATER_LOSS_TOLERANCE),
    }
    agreement = {}
    for name, (a, b, tolerance) in pairs.items():
        difference = abs(a - b) / abs(b)
        agreement |= {f"ours_{name}": a, f"peer_{name}": b, f"{name}_difference": difference}
        if not difference <= tolerance:
            sys.exit(f"{name}: ours is {a}, Hugging Face's {b}; the sides don't do the same work")
    return agreement


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| size | documents | ours tokens/s | Hugging Face tokens/s | its experts, attention | ratio (min–max) "
        "| ratio, same allocator | peak GiB, ours / theirs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plain, kept = (row[key] for key in PEERS)
        lines.append(
            f"| {row['size']} | {row['documents']} | {plain['ours_tokens_per_s']['median']:,.0f} "
            f"| {plain['peer_tokens_per_s']['median']:,.0f} | {row['peer']['experts']}, {row['peer']['attention']} "
            f"| {_ratio(plain['ratio'])} | {_ratio(kept['ratio'])} "
            f"| {plain['ours_peak_gib']:.1f} / {plain['peer_peak_gib']:.1f} |"
        )
    return "\n".join(lines)


def _ratio(ratio: dict[str, float]) -> str:
    return f"**{ratio['median']:.2f}** ({ratio['min']:.2f}–{ratio['max']:.2f})"


def _machine(threads: int) -> dict[str, Any]:
    cpus = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(models),
        "threads": threads,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _names(text: str, known: list[str], parser: argparse.ArgumentParser) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description="Our training step against Hugging Face transformers on this CPU.")
    parser.add_argument("--sizes", default="quickstart,middle,large", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--documents", default="whole,packed", help="whole, packed or both")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    sizes = _names(arguments.sizes, list(SIZES), parser)
    documents = _names(arguments.documents, ["whole", "packed"], parser)

    result: dict[str, Any] = {"machine": _machine(arguments.threads), "rows": []}
    for name in sizes:
        for kind in documents:
            row = compare(SIZES[name], packed=kind == "packed", rounds=arguments.rounds, threads=arguments.threads)
            result["rows"].append(row)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["machine"]))
    print(_table(result["rows"]))


if __name__ == "__main__":
    main()
