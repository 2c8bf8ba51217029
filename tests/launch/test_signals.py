"""A signal asks; only the second Ctrl-C interrupts."""

from __future__ import annotations

import signal

import pytest

from amalthea.launch.signals import StopFlag, exit_code, listen


@pytest.mark.case(8)
@pytest.mark.parametrize(
    ("number", "reason", "code"),
    [(signal.SIGINT, "interrupt", 130), (signal.SIGTERM, "requeue", 75), (signal.SIGUSR1, "requeue", 75)],
)
def test_a_signal_sets_the_flag_and_nothing_else(number: signal.Signals, reason: str, code: int) -> None:
    before = signal.getsignal(number)
    with listen() as flag:
        assert flag.reason() is None
        signal.raise_signal(number)
        assert flag.requested == number.name
        assert flag.reason() == reason
        assert exit_code(flag.reason()) == code
    assert signal.getsignal(number) is before


def test_a_second_interrupt_leaves_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with listen() as flag:
        signal.raise_signal(signal.SIGINT)
        assert flag.requested == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "a third ends the process"
    assert signal.getsignal(signal.SIGINT) is before


def test_what_torchrun_sends_after_ctrl_c_does_not_interrupt() -> None:
    with listen() as flag:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
        assert flag.reason() == "interrupt"


def test_a_run_that_ended_leaves_with_0() -> None:
    assert exit_code(StopFlag().reason()) == 0
