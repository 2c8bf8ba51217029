"""Boundary activations in host memory.

With recompute, a group of blocks keeps only its input, its *boundary*. At long sequences even these fill a GPU, so they
travel: in forward each boundary is copied to a *slot* of the host arena, and in backward it comes back one boundary
ahead of its use. Saved-tensor hooks around the checkpoint see exactly the boundaries; autograd uses them last in,
first out.

Lifetimes, which are what goes wrong in such code:
- a boundary on the device is held until its copy out has been waited for, two boundaries later;
- it comes back into one of two *landings*, device buffers used in turn; the copy into a landing waits until the
  backward that read it has been enqueued, which is so once the next boundary is asked for;
- a slot is free again once its boundary has come back.
Whoever waits names the stream explicitly: asking for the current stream inside the side stream's context would make
the wait wait for nothing.

Shape legend: B sequences of one pass, S tokens, D hidden.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from amalthea.core.errors import ConfigError
from amalthea.core.units import GIB, format_bytes
from amalthea.core.world import World
from amalthea.kernels.attention import Documents
from amalthea.memory.copies import Copies, Ticket
from amalthea.model.attention import Rope
from amalthea.model.blocks import BlockGroup, BlockOutput, GroupRunner
from amalthea.model.transformer import Transformer

_HELD = 2
"""Boundaries on the device whose copy out may still be under way."""


@dataclass(frozen=True)
class OffloadPlan:
    """How many of a forward pass's boundaries travel. The last group's never do: backward wants them at once."""

    boundary_bytes: int
    num_boundaries: int
    """That could travel: groups but the last, times passes."""
    num_slots: int

    @property
    def arena_bytes(self) -> int:
        return self.num_slots * self.boundary_bytes

    def describe(self) -> str:
        return (
            f"{self.num_slots} of {self.num_boundaries} boundaries of {format_bytes(self.boundary_bytes)} offloaded: "
            f"{format_bytes(self.arena_bytes)} of host memory per rank"
        )


def plan_offload(
    *, num_groups: int, num_passes: int, boundary_bytes: int, budget_gib: float | None, host_available_bytes: int
) -> OffloadPlan:
    """Takes as many slots as the budget allows, and refuses a budget that the host does not have.

    `host_available_bytes` is this rank's share of the node's free memory. Raises ConfigError.
    """
    wanted = (num_groups - 1) * num_passes
    slots = wanted if budget_gib is None else min(wanted, int(budget_gib * GIB) // boundary_bytes)
    plan = OffloadPlan(boundary_bytes, wanted, slots)
    if plan.arena_bytes > host_available_bytes:
        raise ConfigError(
            f"memory.offload needs {format_bytes(plan.arena_bytes)} of host memory per rank, and "
            f"{format_bytes(host_available_bytes)} is free; set memory.offload_budget_gib below "
            f"{host_available_bytes / GIB:.1f}, or raise memory.blocks_per_group"
        )
    return plan


@dataclass
class _Boundary:
    """One boundary that left: where it lies, and what is under way."""

    index: int
    slot: int
    shape: torch.Size
    source: torch.Tensor | None
    out: Ticket
    landing: torch.Tensor | None = None
    back: Ticket | None = None


class BoundaryOffload:
    """The arena, the landings and the hooks. One per model; forward and backward alternate.

    Memory: `plan.arena_bytes` of host memory at once (pinned beside a GPU), two boundaries on the device.
    """

    def __init__(self, plan: OffloadPlan, *, dtype: torch.dtype, copies: Copies) -> None:
        self.plan, self.copies = plan, copies
        elements = plan.boundary_bytes // dtype.itemsize
        self.arena = copies.host_buffer(plan.num_slots * elements, dtype).view(plan.num_slots, elements)
        self._landings = [copies.device_buffer(elements, dtype) for _ in range(2 if plan.num_slots else 0)]
        self._free = list(range(plan.num_slots - 1, -1, -1))
        self._away: list[_Boundary] = []
        self._held: deque[_Boundary] = deque()

    def wrap(self, runner: GroupRunner) -> GroupRunner:
        """A runner whose saved boundaries travel."""

        def run(hidden: torch.Tensor, documents: Documents, rope: Rope) -> BlockOutput:
            with saved_tensors_hooks(self._pack, self._unpack):
                return runner(hidden, documents, rope)

        return run

    def _pack(self, tensor: torch.Tensor) -> _Boundary | torch.Tensor:
        """Sends a boundary to the arena, or keeps it where no slot is left."""
        if not self._free or tensor.numel() != self.arena.shape[1]:
            return tensor.detach()
        slot = self._free.pop()
        source = tensor.detach()
        out = self.copies.to_host(source, self.arena[slot])
        boundary = _Boundary(len(self._away), slot, tensor.shape, source, out)
        self._away.append(boundary)
        self._held.append(boundary)
        while len(self._held) > _HELD:
            self._release(self._held.popleft())
        return boundary

    def _release(self, boundary: _Boundary) -> None:
        self.copies.wait(boundary.out)
        boundary.source = None

    def _unpack(self, packed: _Boundary | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        while self._held:
            self._release(self._held.popleft())
        # The backward of the boundary asked for before has been enqueued: its landing may be written again.
        self._bring(packed)
        assert packed.back is not None
        assert packed.landing is not None
        self.copies.wait(packed.back)
        self._away.remove(packed)
        self._free.append(packed.slot)
        if self._away:
            self._bring(self._away[-1])
        return packed.landing.view(packed.shape)

    def _bring(self, boundary: _Boundary) -> None:
        if boundary.back is None:
            boundary.landing = self._landings[boundary.index % 2]
            boundary.back = self.copies.to_device(self.arena[boundary.slot], boundary.landing)


def apply_offload(model: Transformer, plan: OffloadPlan, *, dtype: torch.dtype, copies: Copies) -> BoundaryOffload:
    """Makes every group but the last send its boundary to the host. Call it after `apply_recompute`."""
    offload = BoundaryOffload(plan, dtype=dtype, copies=copies)
    for group in list(model.groups)[:-1]:
        assert isinstance(group, BlockGroup)
        group.runner = offload.wrap(group.runner)
    return offload


def host_bytes_of_rank(world: World) -> int:
    """This rank's share of the node's free memory."""
    return host_available_bytes() // world.local_size


def host_available_bytes() -> int:
    """Memory that the kernel says is available without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
