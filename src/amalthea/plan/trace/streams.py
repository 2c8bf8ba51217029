"""Streams and events that only write down what is asked of them.

FSDP2 asks the module of its device, `torch.cpu` here, for streams and events; torch's own for a CPU do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

from amalthea.plan.events import COMPUTE, Record, Synchronize, Wait
from amalthea.plan.trace.recorder import Recorder


class TracedEvent:
    """`torch.cuda.Event` as far as it is used."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.mark: int | None = None

    def record(self, stream: TracedStream | None = None) -> None:
        self.mark = self._recorder.new_mark()
        if self.mark is not None:
            name = self._recorder.stream if stream is None else stream.name
            self._recorder.write(Record(self.mark, name))

    def wait(self, stream: TracedStream | None = None) -> None:
        """Makes a stream, the current one by default, wait."""
        if self.mark is not None:
            self._recorder.write(Wait(self.mark, self._recorder.stream if stream is None else stream.name))

    def synchronize(self) -> None:
        if self.mark is not None:
            self._recorder.write(Synchronize(self.mark))


class TracedStream:
    """`torch.cuda.Stream` as far as it is used."""

    def __init__(self, recorder: Recorder, priority: int = 0, *, name: str = "unnamed") -> None:
        self._recorder, self.name = recorder, name

    def record_event(self) -> TracedEvent:
        event = TracedEvent(self._recorder)
        event.record(self)
        return event

    def wait_event(self, event: TracedEvent | None) -> None:
        if event is not None:
            event.wait(self)

    def wait_stream(self, other: TracedStream) -> None:
        if other.name != self.name:
            self.wait_event(other.record_event())


@contextmanager
def on_stream(recorder: Recorder, stream: TracedStream | None) -> Iterator[None]:
    """What is enqueued and allocated inside belongs to `stream`."""
    before = recorder.stream
    recorder.stream = before if stream is None else stream.name
    try:
        yield
    finally:
        recorder.stream = before


@contextmanager
def traced_streams(recorder: Recorder) -> Iterator[None]:
    """FSDP2's streams, made and used inside, are written down under its own names for them."""
    lazy_init = FSDPCommContext.lazy_init

    def name_streams(context: Any, device: torch.device) -> None:
        lazy_init(context, device)
        for name in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
            getattr(context, f"{name}_stream").name = name

    def current_stream(device: object = None) -> TracedStream:
        return TracedStream(recorder, name=recorder.stream)

    assert recorder.stream == COMPUTE
    with (
        mock.patch.multiple(
            torch.cpu,
            Stream=partial(TracedStream, recorder),
            Event=partial(TracedEvent, recorder),
            current_stream=current_stream,
            stream=partial(on_stream, recorder),
        ),
        mock.patch.object(FSDPCommContext, "lazy_init", name_streams),
    ):
        yield
