"""Freed memory is kept: using it again touches no fresh pages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from amalthea.core.libc import keep_freed_memory

SIZE = 256 << 20

def fresh_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = b"x" * SIZE
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if {keep}:
    assert keep_freed_memory()
fresh_pages()
print(fresh_pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_memory_once_touched_is_used_again() -> None:
    faults = {}
    for keep in (False, True):
        program = PROGRAM.format(keep=keep)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        faults[keep] = int(done.stdout)
    assert faults[True] < 16
    assert faults[False] > 64, "without it the test would show nothing, even where pages are huge"


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from amalthea.core import libc

    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not libc.keep_freed_memory()
