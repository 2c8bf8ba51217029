"""Peak memory of a step, under one set of names on every device."""

from __future__ import annotations

import ctypes
import resource
from dataclasses import dataclass

import torch

from amalthea.core.libc import glibc
from amalthea.memory.tracker import StorageTracker


@dataclass(frozen=True)
class PeakMemory:
    """What a step took.

    | field | GPU: the caching allocator since the last reading | CPU: this process |
    |---|---|---|
    | `allocated_bytes` | peak of live tensors | the same where storages are tracked, else as reserved |
    | `reserved_bytes` | peak of what was taken from the driver | peak resident set since the process started |
    | `stranded_bytes` | peak of free parts inside segments in use | now freed, and kept by the C library |
    | `num_alloc_retries` | times that all cached memory was given back to serve a request, since the start | 0 |
    """

    allocated_bytes: int
    reserved_bytes: int
    stranded_bytes: int = 0
    num_alloc_retries: int = 0


def peak_memory(device: torch.device, tracker: StorageTracker | None = None) -> PeakMemory:
    """Reads the peak and starts the next one. Does not wait for the device."""
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        allocated = resident
        if tracker is not None:
            allocated = tracker.peak_bytes
            tracker.reset_peak()
        return PeakMemory(allocated, resident, freed_and_kept_bytes())
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return PeakMemory(
        stats["allocated_bytes.all.peak"],
        stats["reserved_bytes.all.peak"],
        stats["inactive_split_bytes.all.peak"],
        stats["num_alloc_retries"],
    )


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc's malloc.h, stable since 2.33."""

    _fields_ = (("before", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))
    fordblks: int


def freed_and_kept_bytes() -> int:
    """Memory that was freed and that glibc keeps for the next request; 0 with another C library. Costs 20 µs."""
    libc = glibc()
    if libc is None or not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _MallInfo
    return int(libc.mallinfo2().fordblks)
