"""What a plan costs: seconds of the processor and peak memory by layers and by ranks; draws `cost.png`.

python benchmarks/plan_cost/run.py --out benchmarks/plan_cost
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAYERS, RANKS = (8, 16, 32), (96, 384, 1536)


def measure(layers: int, gpus: int) -> dict[str, Any]:
    """One plan of the reference model cut to `layers`, in this process: one core's seconds, its own peak memory."""
    from amalthea.config.overrides import apply_overrides
    from amalthea.plan.clusters import get_cluster
    from amalthea.plan.run_plan import plan_run
    from amalthea.plan.setting import Code, Setting
    from amalthea.recipes.europa_1t import europa_1t
    from amalthea.train.build import build
    from amalthea.train.step import train_step

    overrides = [
        f"model.num_layers={layers}",
        f"parallel.dp_replicate={max(1, gpus // 384)}",
        f"train.global_batch_tokens={gpus * 65_536}",
    ]
    config = apply_overrides(europa_1t(), overrides)
    began = time.process_time()
    plan = plan_run(config, Setting(get_cluster("jupiter"), gpus), Code(build, train_step))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "layers": layers,
        "gpus": gpus,
        "cpu_s": time.process_time() - began,
        "peak_gib": peak_kib / 2**20,
        "events": len(plan.trace.events),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for axis, key, fixed in ((left, "layers", "gpus"), (right, "gpus", "layers")):
        value = max(row[fixed] for row in rows) if fixed == "gpus" else min(row[fixed] for row in rows)
        points = sorted((row[key], row["cpu_s"]) for row in rows if row[fixed] == value)
        axis.plot(*zip(*points, strict=True), marker="o")
        axis.set(xlabel=key, ylabel="seconds of one core", ylim=(0, None), title=f"{fixed} {value:,}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    parser.add_argument("--gpus", type=int, nargs="*", default=RANKS)
    parser.add_argument("--one", type=int, nargs=2, metavar=("LAYERS", "GPUS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    pairs = [(n, max(arguments.gpus)) for n in arguments.layers]
    pairs += [(min(arguments.layers), gpus) for gpus in arguments.gpus[:-1]]
    rows = []
    for layers, gpus in pairs:
        # A process for each, so that peaks of memory are each one's own.
        command = [sys.executable, __file__, "--one", str(layers), str(gpus)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(
            "{layers:>3} layers  {gpus:>5} GPUs  {cpu_s:6.1f} s  {peak_gib:.2f} GiB  {events:>7} events".format(
                **rows[-1]
            )
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "cost.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    draw(rows, arguments.out / "cost.png")


if __name__ == "__main__":
    main()
