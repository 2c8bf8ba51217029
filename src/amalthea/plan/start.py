"""Whether the step that is about to run fits into a rank's memory: traced and replayed before anything is built.

The same arithmetic as `amalthea plan`: on a GPU the trace goes through the model of the caching allocator; on a CPU the
bytes of live tensors count. A *simulation*: documents fill their sequences, and experts are evenly loaded.
"""

from __future__ import annotations

from typing import NamedTuple

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.units import GIB, format_bytes
from amalthea.plan.allocator import AllocatorSettings, replay
from amalthea.plan.events import Trace
from amalthea.plan.fits import advice, remedies_for_step
from amalthea.plan.setting import Code
from amalthea.plan.trace import trace_step


class Room(NamedTuple):
    """What a rank may take."""

    device_bytes: int
    host_bytes: int
    is_gpu: bool
    expandable_segments: bool = True
    """Of the GPU's allocator."""


class _Peak(NamedTuple):
    num_bytes: int
    moment: str
    of_pass: int
    """Activations among them, which grow with the tokens of a pass."""


def refusal(config: RunConfig, room: Room, code: Code, *, world_size: int, node_ranks: int) -> str | None:
    """None where rank 0's step fits; else one line with the part of the step in which memory runs out, and up to three
    changes with which it would fit.

    The process must have no process group. Communication: none. Memory: 0.6 GB for a trillion parameters. Time: some
    seconds for a small model, half a minute of one core for 74 layers. Raises ConfigError where the step cannot be
    traced.
    """
    trace = trace_step(
        config,
        rank=0,
        world_size=world_size,
        build=code.build,
        train_step=code.train_step,
        node_ranks=node_ranks,
        gpu=room.is_gpu,
    )
    peak = _beyond_gpu(trace, room) if room.is_gpu else _beyond_host(trace, room)
    if peak is None:
        return None
    remedies = remedies_for_step(
        config,
        resolve(config, world_size=world_size),
        room.device_bytes,
        room.host_bytes,
        peak_bytes=peak.num_bytes,
        pass_bytes=peak.of_pass,
    )
    return (
        f"this step does not fit: memory runs out in {peak.moment}, where a rank holds up to "
        f"{format_bytes(peak.num_bytes)} and has {format_bytes(room.device_bytes)} (simulation; "
        f"memory.plan_at_start=false starts all the same); {advice(peak.num_bytes, room.device_bytes, remedies)}"
    )


def _beyond_gpu(trace: Trace, room: Room) -> _Peak | None:
    settings = AllocatorSettings(expandable_segments=room.expandable_segments, cap_gib=room.device_bytes / GIB)
    memory = replay(trace, settings=settings)
    if memory.fits:
        return None
    assert memory.capped is not None
    failure, at = memory.capped.out_of_memory, memory.demand.peak_allocated
    assert failure is not None
    return _Peak(at.allocated_bytes, failure.moment.phase.label, at.pass_bytes)


def _beyond_host(trace: Trace, room: Room) -> _Peak | None:
    peak_bytes = trace.peak_bytes()
    if peak_bytes <= room.device_bytes:
        return None
    at = replay(trace, settings=AllocatorSettings()).demand.peak_allocated
    return _Peak(peak_bytes, at.phase.label, at.pass_bytes)
