"""The C library of this process, and how it treats memory that tensors free.

glibc serves large tensors by `mmap` and unmaps each as soon as it is freed. A training step frees gigabytes, and so it
would have the kernel clear as many fresh pages in every step.
"""

from __future__ import annotations

import ctypes
import platform

# Of malloc.h; stable since glibc 2.0.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def glibc() -> ctypes.CDLL | None:
    """Its functions where it is glibc, none where it is another one."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for the next tensor instead of returning it to the kernel.

    For training on a CPU: call it before large tensors exist. The process stays as large as it once was. Returns
    whether it took; on another C library nothing changes.
    """
    libc = glibc()
    if libc is None:
        return False
    return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, -1))
