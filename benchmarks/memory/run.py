"""What each memory lever saves, and what it costs: peak bytes and step time of one model, lever by lever.

    python benchmarks/memory/run.py [--size tiny|long] [--device cpu|cuda] [--steps 3] [--lever NAME …]
        [--json FILE]

One process trains the same model on the same batches once for each lever. On a CPU storages are tracked, in steps
apart from the timed ones, and a step's time is processor time; on a GPU the caching allocator's own figures are read,
and *overlap* is the share of copy time between host and device that ran beside kernels. *Estimate* is the formula of
`memory/estimate.py`, held against the bytes alive at the end of the first forward pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.libc import keep_freed_memory
from amalthea.core.tensors import local_tensor
from amalthea.core.world import World
from amalthea.data.batch import Batch
from amalthea.memory.estimate import kept_activations
from amalthea.memory.monitor import peak_memory
from amalthea.memory.tracker import StorageTracker
from amalthea.train import step as step_module
from amalthea.train.build import Run, build
from amalthea.train.step import train_step


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    experts: int
    seq_len: int
    sequences: int
    """Of a step, one to a microbatch; a multiple of 4."""
    vocab: int


SIZES = {
    "tiny": Size(layers=4, hidden=32, experts=4, seq_len=64, sequences=4, vocab=128),
    "long": Size(layers=24, hidden=64, experts=4, seq_len=2048, sequences=4, vocab=1024),
    "gpu": Size(layers=24, hidden=2048, experts=16, seq_len=16384, sequences=4, vocab=65536),
}
LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "recompute, n = 1": {"recompute": "block"},
    "recompute, n = 2": {"recompute": "block", "blocks_per_group": 2},
    "recompute, n = 3": {"recompute": "block", "blocks_per_group": 3},
    "selective": {"recompute": "selective"},
    "selective, attention": {"recompute": "selective", "keep": ("attention",)},
    "offload": {"recompute": "block", "offload": True},
    "breadth first, k = 2": {"recompute": "block", "sequences_per_gather": 2},
    "breadth first, k = 4": {"recompute": "block", "sequences_per_gather": 4},
    "optimizer offload": {"offload_optimizer": True},
    "parameter offload": {"offload_parameters": True},
    "parameter and optimizer offload": {"offload_optimizer": True, "offload_parameters": True},
}


@dataclass
class Row:
    """Bytes, and seconds as the median of the steps; ratios are to the lever `none`."""

    lever: str
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    num_alloc_retries: int = 0
    kept_bytes: int = 0
    estimated_bytes: int = 0
    host_bytes: int = 0
    """For what was offloaded. On a CPU the device is the host, and the peak has it too."""
    step_s: float = 0.0
    step_ratio: float = 1.0
    overlap: float | None = None
    loss: float = 0.0


def measure(lever: str, size: Size, *, device: str, steps: int) -> Row:
    config = config_of(size, LEVERS[lever], device=device)
    world = World(device="cuda" if device == "cuda" else "cpu")
    row = Row(lever)
    tracker = StorageTracker() if device == "cpu" else None
    if tracker is not None:
        tracker.__enter__()
    run = build(config, resolve(config, world_size=1), world)
    with kept_after_forward(run, tracker) as kept:
        row.loss = one_step(run, size, 0)
    row.kept_bytes = kept[0]
    peak_memory(run.device, tracker)
    one_step(run, size, 1)
    peak = peak_memory(run.device, tracker)
    row.peak_allocated_bytes, row.peak_reserved_bytes = peak.allocated_bytes, peak.reserved_bytes
    row.num_alloc_retries = peak.num_alloc_retries
    if tracker is not None:
        tracker.__exit__(None, None, None)
    estimate = kept_activations(config.model, config.memory, pass_tokens=size.seq_len)
    row.estimated_bytes = estimate.device_bytes + still_gathered(run)
    row.host_bytes = host_bytes(run)
    row.step_s = statistics.median(timed(run, size, 2 + number) for number in range(steps))
    if device == "cuda":
        row.overlap = overlap(run, size, 2 + steps)
    return row


def still_gathered(run: Run) -> int:
    """Bytes of the parameters that FSDP2, where there is any, gathers once for forward and backward."""
    if not isinstance(run.model, FSDPModule):
        return 0
    once = (run.model.norm, run.model.head, run.model.groups[-1])
    return sum(parameter.numel() * 4 for module in once for parameter in module.parameters())


@contextmanager
def kept_after_forward(run: Run, tracker: StorageTracker | None) -> Iterator[list[int]]:
    """What the first forward pass of a step left alive."""
    kept: list[int] = []
    plain = step_module.forward

    def live() -> int:
        return tracker.live_bytes if tracker is not None else torch.cuda.memory_allocated()

    def noted(*args: Any, **options: Any) -> Any:
        before = live()
        output = plain(*args, **options)
        kept.append(live() - before)
        return output

    step_module.forward = noted
    try:
        yield kept
    finally:
        step_module.forward = plain


def one_step(run: Run, size: Size, number: int) -> float:
    gathered = run.resolved.gather_sequences
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(size.vocab, (size.sequences, size.seq_len), generator=generator)
    labels = tokens.roll(-1, dims=1)
    lengths = ((size.seq_len,),) * gathered
    microbatches = [
        Batch(tokens[i : i + gathered], labels[i : i + gathered], lengths, ("xx",) * gathered)
        for i in range(0, size.sequences, gathered)
    ]
    return train_step(run, microbatches, lr_factor=1.0, tallies=()).loss


def host_bytes(run: Run) -> int:
    """Memory of what rests on the host: boundaries, optimizer state, parameters and their gradients."""
    memory, total = run.config.memory, 0 if run.offload is None else run.offload.arena_bytes
    if memory.offload_optimizer:
        total += sum(t.numel() * t.element_size() for t in run.optimizers.named_state().values())
    if memory.offload_parameters:
        total += 2 * sum(local_tensor(p.data).nbytes for p in run.model.parameters())
    return total


def timed(run: Run, size: Size, number: int) -> float:
    """Seconds of a step: by the clock on a GPU, of processor time on a CPU, which others may share."""
    clock = time.process_time if run.device.type == "cpu" else time.perf_counter
    begin = clock()
    one_step(run, size, number)
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin


def overlap(run: Run, size: Size, number: int) -> float | None:
    """Share of the time of copies to and from pinned host memory that ran beside kernels; none without copies."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        timed(run, size, number)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CUDA:
            is_copy = "Memcpy" in event.name and "Pinned" in event.name
            spans[is_copy].append((event.time_range.start, event.time_range.end))
    kernels, copies = merged(spans[False]), merged(spans[True])
    total = sum(end - start for start, end in copies)
    beside = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in kernels)
    return beside / total if total else None


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as spans that don't touch."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def config_of(size: Size, memory: dict[str, Any], *, device: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": "memory-benchmark",
            "device": device,
            "precision": "fp32" if device == "cpu" else "bf16",
            "model": {
                "vocab_size": size.vocab,
                "hidden_size": size.hidden,
                "num_layers": size.layers,
                "num_heads": size.hidden // 16 if size.hidden < 512 else size.hidden // 128,
                "num_kv_heads": 2,
                "head_dim": 16 if size.hidden < 512 else 128,
                "max_seq_len": size.seq_len,
                "moe": {"num_experts": size.experts, "top_k": 2, "expert_hidden_size": size.hidden // 2},
                "loss_chunk_tokens": 512,
            },
            "data": {"path": "unused", "seq_len": size.seq_len, "tokenizer": {"vocab_size": size.vocab}},
            "train": {
                "steps": 1,
                "global_batch_tokens": size.seq_len * size.sequences,
                "microbatch_sequences": 1,
            },
            "optim": {"experts": "adamw", "matrices": "adamw"},
            "memory": memory,
        }
    )


def table(rows: list[Row], *, device: str) -> str:
    on_gpu = device == "cuda"
    lines = [
        "| lever | peak MiB | host MiB | "
        + ("reserved MiB | retries | overlap | " if on_gpu else "")
        + "kept MiB | estimated MiB | error | step s | ratio |",
        "|---" * (11 if on_gpu else 8) + "|",
    ]
    for row in rows:
        error = row.estimated_bytes / row.kept_bytes - 1
        share = "–" if row.overlap is None else f"{row.overlap:.0%}"
        gpu = f"{row.peak_reserved_bytes / 2**20:,.1f} | {row.num_alloc_retries} | {share} | " if on_gpu else ""
        peak, host, kept, estimated = (
            f"{num_bytes / 2**20:,.1f}"
            for num_bytes in (row.peak_allocated_bytes, row.host_bytes, row.kept_bytes, row.estimated_bytes)
        )
        lines.append(
            f"| {row.lever} | {peak} | {host} | {gpu}{kept} | {estimated} | {error:+.2%} | {row.step_s:.2f} "
            f"| {row.step_ratio:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes and step time of each memory lever.")
    parser.add_argument("--size", choices=SIZES, default="long")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lever", choices=LEVERS, action="append", help="only this one beside `none`; may be repeated")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        keep_freed_memory()
    backend = "gloo" if arguments.device == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows: list[Row] = []
    for lever in ["none", *arguments.lever] if arguments.lever else LEVERS:
        rows.append(measure(lever, SIZES[arguments.size], device=arguments.device, steps=arguments.steps))
        rows[-1].step_ratio = rows[-1].step_s / rows[0].step_s
        print(f"{lever}: {rows[-1].step_s:.2f} s a step", file=sys.stderr, flush=True)
        gc.collect()
        if arguments.json:
            figures = {"size": asdict(SIZES[arguments.size]), "rows": [asdict(row) for row in rows]}
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(table(rows, device=arguments.device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
