"""Signals ask a run to save and leave; they never interrupt a step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL: the run was stopped from outside, has saved, and is to be started again."""
INTERRUPT_EXIT_CODE = 130
"""128 + SIGINT, as a shell has it: the user stopped the run."""

StopReason = Literal["interrupt", "requeue"]

_LISTENED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopFlag:
    """Set by the first signal; training looks at it at the end of each step, and the ranks agree."""

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the signal, such as `SIGTERM`."""

    def request(self, name: str) -> None:
        """Ask to stop; the first signal stays."""
        self.requested = self.requested or name

    def reason(self) -> StopReason | None:
        """What training is told: `interrupt` for Ctrl-C, `requeue` for a scheduler's signal."""
        if self.requested is None:
            return None
        return "interrupt" if self.requested == "SIGINT" else "requeue"


@contextmanager
def listen() -> Iterator[StopFlag]:
    """Catch SIGINT, SIGTERM and SIGUSR1 for the time of the block; a second SIGINT interrupts at once.

    Call it in the main thread. The handlers that were there before come back afterwards.
    """
    flag = StopFlag()
    interrupts = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        flag.request(signal.Signals(number).name)
        if number != signal.SIGINT:
            return
        interrupts += 1
        if interrupts == 2:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third ends even what no longer answers
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in _LISTENED}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def exit_code(stopped: StopReason | None) -> int:
    """0 for a run that ended, 130 where Ctrl-C stopped it, 75 where it is to be started again."""
    if stopped is None:
        return 0
    return INTERRUPT_EXIT_CODE if stopped == "interrupt" else REQUEUE_EXIT_CODE
