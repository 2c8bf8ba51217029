"""The tables, and the ratios of ours to the peers."""

from __future__ import annotations

import os
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from sides import OURS, TORCH

TARGET = 0.8


def ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ours over the best peer, round by round; a peer is best by its median. `torch.optim.Muon`'s is of medians."""
    times: dict[tuple[str, str], list[float]] = {(row["name"], row["part"]): row["wall_s"] for row in rows}
    forms = [name for name, part in times if name.startswith(OURS) and part == "both"]
    names = [name for name, part in times if not name.startswith(OURS) and part == "both"]

    def best(*parts: str) -> str:
        return min(names, key=lambda name: sum(statistics.median(times[name, part]) for part in parts))

    def over(form: str, peer_of_part: dict[str, str]) -> dict[str, Any]:
        mine = [times[form, part] for part in peer_of_part]
        theirs = [times[name, part] for part, name in peer_of_part.items()]
        per_round = [sum(a) / sum(b) for a, b in zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True)]
        return {**_spread(per_round), "peers": peer_of_part}

    found: dict[str, Any] = {}
    for form in forms:
        ways = found[form] = {}
        if names:
            parts = ("experts", "dense")
            ways["in one step, best peer"] = over(form, {"both": best("both")})
            ways["each part alone and added, best peer"] = over(form, dict.fromkeys(parts, best(*parts)))
            ways["each part alone and added, best peer of each"] = over(form, {part: best(part) for part in parts})
        if (TORCH, "dense") in times:
            mine, theirs = (
                sum(statistics.median(times[name, part]) for part in ("experts", "dense")) for name in (form, TORCH)
            )
            ways["each part alone and added, torch.optim.Muon"] = {
                "median": mine / theirs,
                "min": mine / theirs,
                "max": mine / theirs,
                "peers": dict.fromkeys(("experts", "dense"), TORCH),
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


def ratio_table(found: dict[str, Any]) -> str:
    lines = [f"| experts and dense together (target {TARGET}) | ratio (min–max) | peer |", "|---|---|---|"]
    for form, ways in found.items():
        for way, ratio in ways.items():
            chosen = ", ".join(dict.fromkeys(ratio["peers"].values()))
            lines.append(
                f"| {form}: {way} | **{ratio['median']:.3g}** ({ratio['min']:.3g}–{ratio['max']:.3g}) | {chosen} |"
            )
    return "\n".join(lines)


def phase_table(phases: dict[str, dict[str, dict[str, float]]]) -> str:
    """Milliseconds a step of each phase, by the clock and of the processor, means over ranks."""
    lines = ["| part | phase | ms | processor ms |", "|---|---|---|---|"]
    for part, by_phase in phases.items():
        for phase, seconds in by_phase.items():
            lines.append(f"| {part} | {phase} | {seconds['wall_s'] * 1e3:.1f} | {seconds['cpu_s'] * 1e3:.1f} |")
    return "\n".join(lines)


def machine(peers_folder: str) -> dict[str, Any]:
    cpus = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    found = metadata.distributions(path=[peers_folder])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{distribution.metadata["Name"]: distribution.version for distribution in found},
    }
