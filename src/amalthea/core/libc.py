"""The C library of this process."""

from __future__ import annotations

import ctypes
import platform


def glibc() -> ctypes.CDLL | None:
    """Its functions where it is glibc, none where it is another one."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
