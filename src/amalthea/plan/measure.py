"""This machine as a cluster: what it multiplies, copies and sends, *measured* in seconds.

Rates are the best of several tries, so they are what the machine can do, not what it does beside other work. Figures
that were not measured are named in `unverified`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from amalthea.core.errors import ConfigError
from amalthea.memory.offload import host_available_bytes
from amalthea.plan.clusters import Cluster
from amalthea.plan.step_speeds import Assumptions

_TRIES = 3
_SHARD_BYTES = 8 << 20
_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Machine:
    """A cluster of one node, and what is assumed of it: that what was measured is reached."""

    cluster: Cluster
    assumptions: Assumptions


def measure_this(*, num_processes: int = 1, device: str = "cpu", budget_s: float = 6.0) -> Machine:
    """Measures one device, and an all-gather among `num_processes` of the CPU.

    `budget_s` is for all measurements but the all-gather, each of which takes at least three tries. Links between GPUs
    are not measured. Communication: gloo among processes forked here, before any other work, so call it before threads
    are at work. Memory: 0.4 GiB. Raises ConfigError where the number is not positive or the processes do not answer.
    """
    if num_processes < 1:
        raise ConfigError(f"{num_processes} processes cannot be measured; give 1 or more")
    link = _gather_bytes_per_s(num_processes) if num_processes > 1 and device == "cpu" else None
    at, share = torch.device(device), budget_s / 3
    half = _product_flops_per_s(at, torch.bfloat16, share)
    single = _product_flops_per_s(at, torch.float32, share)
    copied = _copy_bytes_per_s(at, share)
    memory_bytes = torch.cuda.mem_get_info()[1] if at.type == "cuda" else host_available_bytes() // num_processes
    guessed = ("inter_gb_per_s", *(("intra_gb_per_s",) if link is None else ()))
    # Without neighbours there is nothing to send, and without a network nobody further: as fast as memory.
    link = copied if link is None else link
    cluster = Cluster(
        name="this",
        gpu=torch.cuda.get_device_name() if at.type == "cuda" else platform.processor() or platform.machine(),
        num_nodes=1,
        gpus_per_node=num_processes,
        peak_tflops=half / 1e12,
        hbm_gb=memory_bytes / 1e9,
        hbm_tb_per_s=copied / 1e12,
        intra_gb_per_s=link / 1e9,
        inter_gb_per_s=link / 1e9,
        host_gb=host_available_bytes() / num_processes / 1e9,
        network="not measured",
        scheduler="none",
        source="measured",
        host_link_gb_per_s=copied / 2e9,
        unverified=(*guessed, "host_link_gb_per_s"),
    )
    reached = Assumptions(
        matmul=1.0, matmul_half_flops=0.0, fp32_peak=single / half, hbm=1.0, intra_node=1.0, network=1.0
    )
    return Machine(cluster, reached)


def _best_s(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Seconds of the fastest of at least three tries, after one that warms up."""
    times: list[float] = []
    stop = time.perf_counter() + budget_s
    work()
    while len(times) < _TRIES or time.perf_counter() < stop:
        _finish(device)
        began = time.perf_counter()
        work()
        _finish(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _product_flops_per_s(device: torch.device, dtype: torch.dtype, budget_s: float) -> float:
    side = 8192 if device.type == "cuda" else 768
    # Random values: a GPU multiplies zeros faster.
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _best_s(lambda: left @ right, device, budget_s)


def _copy_bytes_per_s(device: torch.device, budget_s: float) -> float:
    """Read and written together."""
    source = torch.ones(32 << 20, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _best_s(lambda: target.copy_(source), device, budget_s)


def _gather_bytes_per_s(num_processes: int) -> float:
    """Bytes per second out of each of several processes in a ring's all-gather."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_gather, args=(Path(folder) / "store", rank, num_processes, theirs), daemon=True)
            for rank in range(num_processes)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            if not ours.poll(_PATIENCE_S):
                raise ConfigError(f"{num_processes} processes did not gather within {_PATIENCE_S:g} s; measure fewer")
            seconds = ours.recv()
        except EOFError:
            raise ConfigError(f"gloo failed among {num_processes} processes of this machine; measure 1") from None
        finally:
            for process in processes:
                process.join(timeout=1.0)
                process.kill()
    return (num_processes - 1) * _SHARD_BYTES / seconds


def _gather(store: Path, rank: int, num_processes: int, answer: Connection) -> None:
    """One of the forked processes. It leaves without cleaning up what it has of its parent's."""
    torch.set_num_threads(1)
    gloo: Any = dist.ProcessGroupGloo  # its type stubs lack most of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    group = gloo(dist.FileStore(str(store), num_processes), rank, num_processes, options)
    shard = torch.ones(_SHARD_BYTES, dtype=torch.uint8)
    whole = torch.empty(num_processes * _SHARD_BYTES, dtype=torch.uint8)

    def gather() -> None:
        group._allgather_base(whole, shard).wait()

    gather()
    times = []
    for _ in range(5):
        group.barrier().wait()
        began = time.perf_counter()
        gather()
        times.append(time.perf_counter() - began)
    if rank == 0:
        answer.send(min(times))
    group.barrier().wait()
    os._exit(0)
