"""This machine as a cluster: what it multiplies, copies and sends, *measured* in seconds.

Rates are means of several tries, of one process while the others do the same. Figures that were not measured are named
in `unverified`. They describe the machine; the step of a trace is timed operation by operation (`plan/stopwatch.py`).
"""

from __future__ import annotations

import platform

import torch

from amalthea.memory.offload import host_available_bytes
from amalthea.plan.clusters import Cluster
from amalthea.plan.events import Exchange
from amalthea.plan.step_speeds import Assumptions
from amalthea.plan.stopwatch import Stopwatch
from amalthea.plan.trace.calls import Call, CallBook

THIS = "this"
"""The name of the cluster that is the machine itself."""
_SHARD_BYTES = 8 << 20
_COPIED_ELEMENTS = 32 << 20


def measure_this(stopwatch: Stopwatch) -> tuple[Cluster, Assumptions]:
    """A cluster of this one node, and what is assumed of it: that what was measured is reached.

    One device is measured, and an all-gather among the stopwatch's processes; links to other nodes and to host memory
    are not. Time: a second. Memory: 0.3 GiB in each process. Raises ConfigError where the processes do not answer.
    """
    count, on_gpu = stopwatch.num_processes, stopwatch.device == "cuda"
    side = 8192 if on_gpu else 768
    half, single, copy = stopwatch.kernels([_product(side, torch.bfloat16), _product(side, torch.float32), _copy()])
    peak, copied = 2 * side**3 / half, 8 * _COPIED_ELEMENTS / copy
    link = copied  # without neighbours there is nothing to send: as fast as memory
    if count > 1:
        shards = Exchange("all_gather", tuple(range(count)), _SHARD_BYTES, count * _SHARD_BYTES)
        link = (count - 1) * _SHARD_BYTES / stopwatch.exchanges([shards])[0]
    memory_bytes = torch.cuda.mem_get_info()[1] if on_gpu else host_available_bytes() // count
    cluster = Cluster(
        name=THIS,
        gpu=torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        num_nodes=1,
        gpus_per_node=count,
        peak_tflops=peak / 1e12,
        hbm_gb=memory_bytes / 1e9,
        hbm_tb_per_s=copied / 1e12,
        intra_gb_per_s=link / 1e9,
        inter_gb_per_s=link / 1e9,
        host_gb=host_available_bytes() / count / 1e9,
        network="not measured",
        scheduler="none",
        source="measured",
        host_link_gb_per_s=copied / 2e9,
        unverified=("inter_gb_per_s", *(("intra_gb_per_s",) if count == 1 else ()), "host_link_gb_per_s"),
    )
    reached = Assumptions(
        matmul=1.0, matmul_half_flops=0.0, fp32_peak=half / single, hbm=1.0, intra_node=1.0, network=1.0
    )
    return cluster, reached


def _product(side: int, dtype: torch.dtype) -> Call:
    left, right = (torch.empty(side, side, dtype=dtype, device="meta") for _ in range(2))
    return _call(torch.ops.aten.mm.default, left, right)


def _copy() -> Call:
    target, source = (torch.empty(_COPIED_ELEMENTS, device="meta") for _ in range(2))
    return _call(torch.ops.aten.copy_.default, target, source)


def _call(function: object, *tensors: torch.Tensor) -> Call:
    book = CallBook()
    book.number(function, tensors, {})
    return book.calls[0]
