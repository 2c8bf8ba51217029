"""Peak memory of a step, under one name on every device."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PeakMemory:
    """Bytes. On a GPU from the caching allocator since the last reset; on a CPU both are the process's peak
    resident set since it started."""

    allocated_bytes: int
    reserved_bytes: int


def peak_memory(device: torch.device) -> PeakMemory:
    """Reads the peak and, on a GPU, starts the next one. Does not wait for the device."""
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return PeakMemory(resident, resident)
    peak = PeakMemory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    torch.cuda.reset_peak_memory_stats(device)
    return peak
