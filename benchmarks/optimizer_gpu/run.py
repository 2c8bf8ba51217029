"""One rank's share of the 951.9 B model's Muon step, on one GPU.

    python benchmarks/optimizer_gpu/run.py --device cuda [--rounds 5] [--json FILE]
    python benchmarks/optimizer_gpu/run.py --device cpu --scale 16

The planner lays `europa-1t` out on one replica of 384 ranks; the share is that of its busiest rank: its experts'
matrices and the dense matrices that it owns. The exchanges between ranks are left out: in a run they happen under the
experts' arithmetic. `--scale` divides both sides of every matrix.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from amalthea.flexshard.layout import Grid, StoredParameter
from amalthea.flexshard.plan import plan_layout
from amalthea.optim.config import MuonConfig
from amalthea.optim.dist_muon import DistMuon
from amalthea.optim.flops import orthogonalize_flops
from amalthea.plan.optimizer_step import plan_optimizer_step
from amalthea.recipes.europa_1t import europa_1t

PUBLISHED_S = 2.2
"""Optimizer step of the reference run (PyTorch blog, 2026-11-12)."""
BOUND_S = 0.17
"""Estimate for the standard form: 107 TFLOP at 700 TFLOP/s, and element-wise passes at an H100's memory speed. With
the Gram form and products that use symmetry, 0.085 s."""
NUM_RANKS = 384

Form = Literal["standard", "gram"]


@dataclass(frozen=True)
class Share:
    """Shapes of the matrices that a rank orthogonalizes, with how many there are of each."""

    experts: dict[tuple[int, int], int]
    dense: dict[tuple[int, int], int]

    def scaled(self, divisor: int) -> Share:
        def smaller(shapes: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
            return {(max(1, rows // divisor), max(1, cols // divisor)): n for (rows, cols), n in shapes.items()}

        return Share(smaller(self.experts), smaller(self.dense))

    @property
    def flops(self) -> int:
        return sum(
            count * orthogonalize_flops(*shape) for s in (self.experts, self.dense) for shape, count in s.items()
        )

    @property
    def elements(self) -> int:
        return sum(count * rows * columns for (rows, columns), count in self._all)

    @property
    def _all(self) -> list[tuple[tuple[int, int], int]]:
        return [*self.experts.items(), *self.dense.items()]

    def to_json(self) -> dict[str, Any]:
        def named(shapes: dict[tuple[int, int], int]) -> dict[str, int]:
            return {f"{rows}x{columns}": count for (rows, columns), count in shapes.items()}

        return {
            "experts": named(self.experts),
            "dense": named(self.dense),
            "tflop": self.flops / 1e12,
            "elements": self.elements,
        }


def busiest_share() -> Share:
    """Of the rank with most Newton-Schulz FLOP in one replica of `europa-1t`."""
    config = europa_1t()
    parallel = config.parallel.model_copy(update={"dp_replicate": 1})
    plan = plan_optimizer_step(config.model_copy(update={"parallel": parallel}), num_gpus=NUM_RANKS)
    experts, dense = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for unit, owner, is_expert in zip(plan.layout.units, plan.layout.owners, plan.ledger.is_expert, strict=True):
        if tuple(owner) == plan.busiest:
            shape = (unit.stop - unit.start, plan.layout.parameters[unit.parameter].columns)
            (experts if is_expert else dense)[shape] += 1
    return Share(dict(experts), dict(dense))


def make_optimizer(share: Share, *, form: Form, device: torch.device) -> DistMuon:
    """The share as whole local parameters: stacks of one expert, as a rank stores them, and 2-D matrices."""
    shapes: list[tuple[int, ...]] = [(1, *shape) for shape, count in share.experts.items() for _ in range(count)]
    shapes += [shape for shape, count in share.dense.items() for _ in range(count)]
    stored = [
        StoredParameter(f"matrix_{number}", shape, "experts" if len(shape) == 3 else "rows")
        for number, shape in enumerate(shapes)
    ]
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    config = MuonConfig(form=form)
    return DistMuon(
        parameters,
        config=config,
        layout=plan_layout(stored, Grid(1, 1), cost=partial(orthogonalize_flops, num_steps=config.num_steps)),
        replica=0,
        rank=0,
        shard_group=None,
        replica_group=None,
    )


def measure(share: Share, *, form: Form, device: torch.device, rounds: int) -> dict[str, Any]:
    """Seconds of `rounds` steps after a first one, and the peak of memory."""
    torch.manual_seed(0)
    optimizer = make_optimizer(share, form=form, device=device)
    at_rest = _allocated(device)
    optimizer.step()
    times = []
    for _ in range(rounds):
        _synchronize(device)
        start = time.perf_counter()
        optimizer.step()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    return {
        "form": form,
        "median_s": median,
        "min_s": min(times),
        "max_s": max(times),
        "standard_tflops": share.flops / median / 1e12,
        "at_rest_bytes": at_rest,
        "peak_bytes": _peak(device),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    """Bytes of parameters, gradients and momenta; starts the count of the peak."""
    if device.type != "cuda":
        return _peak(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    """Allocated on a GPU; on a CPU the most that the process ever had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank's share of the 951.9 B model's Muon step on one GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divides both sides of every matrix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; try --device cpu --scale 16")
    device = torch.device(arguments.device)

    share = busiest_share().scaled(arguments.scale)
    rows = [measure(share, form=form, device=device, rounds=arguments.rounds) for form in ("standard", "gram")]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "device": _name(device),
        "torch": torch.__version__,
        "scale": arguments.scale,
        "share": share.to_json(),
        "published_s": PUBLISHED_S,
        "bound_s": BOUND_S,
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{result['device']}, torch {torch.__version__}, {result['date']}; share: {json.dumps(share.to_json())}")
    print("| form | seconds (min–max) | TFLOP/s, of the standard form's | published | estimated bound | peak GiB |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['form']} | **{row['median_s']:.3f}** ({row['min_s']:.3f}–{row['max_s']:.3f}) "
            f"| {row['standard_tflops']:.3g} | {PUBLISHED_S} | {BOUND_S} | {row['peak_bytes'] / 2**30:.1f} |"
        )
    if arguments.scale != 1 or arguments.device != "cuda":
        print("Not comparable with the published time and the bound: these are of full size on one GPU.")


if __name__ == "__main__":
    main()
