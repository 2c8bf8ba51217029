"""Parameters, gradients and optimizer state in host memory.

They are used once a step, a batch at a time, in the same order every step. So they rest in host memory; a batch comes
when it is asked for, the next one of that order comes ahead, and what was changed goes back while the next one is at
work.

Lifetimes: a batch on the device, a *visit*, is held until its copy back has been waited for; host memory is not read
while a visit may still change it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from amalthea.core.errors import ConfigError
from amalthea.core.units import format_bytes
from amalthea.memory.copies import Copies, Ticket

_HELD = 1
"""Visits on the device whose copy back may still be under way."""

_ALIGNED_BYTES = 16
"""What lay apart on the host begins at a multiple of these on the device, as kernels that read several numbers want."""


@dataclass(frozen=True, eq=False)
class Resting:
    """Tensors that travel together, each of them contiguous and all of one dtype.

    They are found anew for each visit: gradients are others in every step.
    """

    find: Callable[[], Sequence[torch.Tensor]]
    changes: bool = True
    """Whether what they hold on the device goes back."""
    rests: bool = True
    """Otherwise they lie on the device, and nothing travels."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.find())


Groups = tuple[Resting, ...]
"""What visits together, as a whole one stop in the order of a step."""


class _Run(NamedTuple):
    """Neighbours in one storage of the host, flat."""

    flat: torch.Tensor
    shapes: list[torch.Size]

    @property
    def place(self) -> tuple[int, int, int]:
        """Its storage, and its first byte and its end there."""
        width = self.flat.element_size()
        start = int(self.flat.storage_offset()) * width
        return self.flat.untyped_storage()._cdata, start, start + self.flat.numel() * width


@dataclass
class _Visit:
    groups: Groups
    here: list[tuple[torch.Tensor, ...]]
    """On the device, by group."""
    pairs: list[tuple[_Run, torch.Tensor]]
    """What goes back, and from where."""
    tickets: list[Ticket]
    """Of the copies to the device, later of the copies back."""


class HostState:
    """Host memory (pinned beside a GPU) whose tensors visit the device. What optimizers know as a `Rest`.

    `state` says whether optimizer state rests here, `parameters` whether parameters and gradients do, which FSDP2 keeps
    in host memory then; what does not rest lies on the device. Memory on the device: at most three batches: one at
    work, one coming, one leaving.
    """

    def __init__(
        self, copies: Copies, *, device: torch.device, host_bytes: int, state: bool = True, parameters: bool = False
    ) -> None:
        self.copies, self.device = copies, device
        self._state_rests, self._parameters_rest = state, parameters
        self._host_bytes, self._resting_bytes = host_bytes, 0
        self._after: dict[Groups, Groups] = {}
        self._first: Groups | None = None
        self._last: Groups | None = None
        self._coming: _Visit | None = None
        self._leaving: deque[_Visit] = deque()

    def zeros(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> Resting:
        """Memory for state of these shapes, which travels together.

        Raises ConfigError where all that was asked for exceeds `host_bytes`.
        """
        elements = sum(shape.numel() for shape in shapes)
        if not self._state_rests:
            here = _views(torch.zeros(elements, dtype=dtype, device=self.device), shapes)
            return Resting(lambda: here, rests=False)
        self._resting_bytes += elements * dtype.itemsize
        check_host_bytes("memory.offload_optimizer", self._resting_bytes, self._host_bytes)
        tensors = _views(self.copies.host_buffer(elements, dtype).zero_(), shapes)
        return Resting(lambda: tensors)

    def parameters(self, find: Callable[[], Sequence[torch.Tensor]]) -> Resting:
        """Parts of parameters, to be changed in place."""
        return Resting(find, rests=self._parameters_rest)

    def gradients(self, find: Callable[[], Sequence[torch.Tensor]], *, changes: bool = False) -> Resting:
        """Gradients, of this step whenever they visit; with `changes` what becomes of them goes back."""
        return Resting(find, changes=changes, rests=self._parameters_rest)

    @contextmanager
    def at_hand(self, *groups: Resting) -> Iterator[tuple[tuple[torch.Tensor, ...], ...]]:
        """The tensors of each group on the device; what they hold at the end goes back to the host.

        The same groups visit together once a step, so that their turn can be learned.
        """
        travelling = tuple(group for group in groups if group.rests)
        visit = self._arrive(travelling) if travelling else None
        here = iter(visit.here if visit is not None else ())
        yield tuple(next(here) if group.rests else group.tensors for group in groups)
        if visit is not None:
            visit.tickets = [self.copies.to_host(flat, run.flat) for run, flat in visit.pairs]
            self._leaving.append(visit)
            while len(self._leaving) > _HELD:
                self._let_go()

    def land(self) -> None:
        """Whatever is computed from here on, gathers of parameters too, finds on the host what visits have changed."""
        while self._leaving:
            self._let_go()

    def settle(self) -> None:
        """Returns once everything is at rest, so that the host may read and write it."""
        self.land()
        self._turn_away()
        if self.device.type == "cuda":
            # It waits for the copies, so who waits for it has waited for them.
            torch.cuda.current_stream(self.device).synchronize()

    def _arrive(self, groups: Groups) -> _Visit:
        self._learn(groups)
        if self._coming is not None and self._coming.groups != groups:
            self._turn_away()
        visit, self._coming = self._coming, None
        if visit is None:
            visit = self._bring(groups, _runs(groups))
        self._wait(visit)
        following = self._after.get(groups)
        # Not over the end of a step: between steps the device belongs to the model.
        if following is not None and following not in (self._first, groups):
            runs = _runs(following)
            if not _changes_any(visit, runs):
                self._coming = self._bring(following, runs)
        return visit

    def _turn_away(self) -> None:
        """Lets go of a visit that came in vain, once its memory is not written any more."""
        if self._coming is not None:
            self._wait(self._coming)
            self._coming = None

    def _let_go(self) -> None:
        visit = self._leaving.popleft()  # held by this name until the copies have been waited for
        self._wait(visit)

    def _wait(self, visit: _Visit) -> None:
        for ticket in visit.tickets:
            self.copies.wait(ticket)
        visit.tickets = []

    def _learn(self, groups: Groups) -> None:
        if self._first is None:
            self._first = groups
        if self._last is not None:
            self._after[self._last] = groups
        self._last = groups

    def _bring(self, groups: Groups, runs: list[list[_Run]]) -> _Visit:
        while any(_changes_any(visit, runs) for visit in self._leaving):
            self._let_go()
        visit = _Visit(groups, [], [], [])
        for group, of_group in zip(groups, runs, strict=True):
            visit.here.append(self._bring_group(visit, group, of_group))
        return visit

    def _bring_group(self, visit: _Visit, group: Resting, runs: list[_Run]) -> tuple[torch.Tensor, ...]:
        if not runs:
            return ()
        dtype = runs[0].flat.dtype
        aligned = _ALIGNED_BYTES // dtype.itemsize
        ends, total = [], 0
        for run in runs:
            ends.append(total)
            total += -(-run.flat.numel() // aligned) * aligned
        buffer, here = self.copies.device_buffer(total, dtype), []
        for run, start in zip(runs, ends, strict=True):
            flat = buffer[start : start + run.flat.numel()]
            here += _views(flat, run.shapes)
            if flat.numel():
                visit.tickets.append(self.copies.to_device(run.flat, flat))
                if group.changes:
                    visit.pairs.append((run, flat))
        return tuple(here)


def check_host_bytes(setting: str, needed_bytes: int, host_bytes: int) -> None:
    """Raises ConfigError where a rank has less free host memory than a setting needs at least."""
    if needed_bytes > host_bytes:
        raise ConfigError(
            f"{setting} needs {format_bytes(needed_bytes)} of host memory per rank or more, and "
            f"{format_bytes(host_bytes)} is free; set {setting}=false, lower memory.offload_budget_gib, "
            "or take more ranks"
        )


def _runs(groups: Groups) -> list[list[_Run]]:
    """The tensors of each group, in order, neighbours joined: they travel in one copy."""
    return [_join(group.tensors) for group in groups]


def _join(tensors: Sequence[torch.Tensor]) -> list[_Run]:
    joined: list[list[torch.Tensor]] = []
    end: tuple[int, int] | None = None
    for tensor in tensors:
        assert tensor.is_contiguous()
        storage, start = tensor.untyped_storage()._cdata, int(tensor.storage_offset())
        if (storage, start) == end:
            joined[-1].append(tensor)
        else:
            joined.append([tensor])
        end = (storage, start + tensor.numel())
    return [
        _Run(
            neighbours[0].as_strided((sum(t.numel() for t in neighbours),), (1,)),
            [tensor.shape for tensor in neighbours],
        )
        for neighbours in joined
    ]


def _changes_any(visit: _Visit, runs: list[list[_Run]]) -> bool:
    """Whether what a visit takes back lies where `runs` do."""
    changed: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for run, _ in visit.pairs:
        storage, start, end = run.place
        changed[storage].append((start, end))
    return any(
        first < end and start < last
        for of_group in runs
        for storage, start, end in (run.place for run in of_group)
        for first, last in changed.get(storage, ())
    )


def _views(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> tuple[torch.Tensor, ...]:
    parts = flat.split([shape.numel() for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
