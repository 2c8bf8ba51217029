"""One rank's part of a layout, executed: slabs, and the exchanges that bring units to owners and back.

A *slab* is a block of this rank's local tensor whose units have one owner: experts × rows × columns, a view. Slabs of
this rank's own replica carry its optimizer state. *Local* slabs hold whole units that this rank owns. *Routed* slabs
are pieces: `UnitExchange` sends them all in one all-to-all, hands out whole matrices, and takes the results back in
another. `ReplicaExchange` reduces gradients to the owning replica and spreads its updates.

Exchanges come in phases, so that a caller computes between them: `launch` packs and starts, `finish` waits and
unpacks. A buffer lives from its launch to the end of its finish.

Shape legend: E experts, R rows, C columns of a slab; M equal matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from amalthea.core.scratch import Scratch
from amalthea.flexshard.buckets import BUCKET_ELEMENTS, replica_buckets
from amalthea.flexshard.layout import Layout, Owner, Piece


@dataclass(frozen=True)
class Slab:
    """Local experts [first, last) and rows [top, bottom) of parameter number `parameter`.

    `expert` and `row` are the global numbers of its first expert and row; `units` are indices into the layout's units,
    one per expert; `is_local` where these units are whole here and owned here.
    """

    parameter: int
    first: int
    last: int
    top: int
    bottom: int
    expert: int
    row: int
    units: tuple[int, ...]
    owner: Owner
    is_local: bool

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The slab [E, R, C] of this rank's part of the parameter ([E, R, C] or [R, C]), sharing memory."""
        stack = local if local.ndim == 3 else local[None]
        return stack[self.first : self.last, self.top : self.bottom]


def slabs_of(layout: Layout, *, rank: int) -> list[Slab]:
    """All slabs that `rank` stores, in order of units: the same list on this rank of every replica."""
    slabs: list[Slab] = []
    boxes = [parameter.box(layout.grid, rank) for parameter in layout.parameters]
    for index, (unit, owner) in enumerate(zip(layout.units, layout.owners, strict=True)):
        box = boxes[unit.parameter]
        start, stop = max(unit.start, box.row_start), min(unit.stop, box.row_stop)
        if not box.expert_start <= unit.expert < box.expert_stop or start >= stop:
            continue
        is_local = owner.rank == rank and (start, stop) == (unit.start, unit.stop)
        local = unit.expert - box.expert_start
        slab = Slab(
            parameter=unit.parameter,
            first=local,
            last=local + 1,
            top=start - box.row_start,
            bottom=stop - box.row_start,
            expert=unit.expert,
            row=start,
            units=(index,),
            owner=owner,
            is_local=is_local,
        )
        slabs.append(slab)
        _merge_last(slabs)
    return slabs


def _merge_last(slabs: list[Slab]) -> None:
    """Joins the last two slabs where they are neighbouring whole experts of one owner."""
    if len(slabs) < 2:
        return
    before, last = slabs[-2:]
    same = (before.parameter, before.top, before.bottom, before.owner) == (
        last.parameter,
        last.top,
        last.bottom,
        last.owner,
    )
    if same and before.is_local and last.is_local and before.last == last.first:
        slabs[-2:] = [
            Slab(**{**vars(before), "last": last.last, "units": before.units + last.units})  # type: ignore[arg-type]
        ]


class _Arrival(NamedTuple):
    """A piece of an owned unit: elements from `start` of stack number `stack`, received from `sender`."""

    sender: int
    unit: int
    stack: int
    start: int
    size: int


@dataclass(frozen=True)
class _Route:
    """A routed unit: its shape, its owner's rank and its pieces."""

    index: int
    rows: int
    columns: int
    owner_rank: int
    start: int
    pieces: tuple[Piece, ...]


class UnitExchange:
    """Brings one replica's routed units to their owners and the results back.

    Communication, over `group` (the replica's ranks): one uneven bf16 all-to-all each way, whose sizes all follow from
    the layout; none where nothing is routed, which is the same on every rank. Memory: twice this rank's routed slabs
    and three times its owned routed units, in bf16, from `scratch`; a buffer is used again in the next step.
    """

    def __init__(
        self,
        layout: Layout,
        slabs: Sequence[Slab],
        *,
        replica: int,
        rank: int,
        group: dist.ProcessGroup | None,
        scratch: Scratch | None = None,
    ) -> None:
        self.rank, self.group = rank, group
        self._scratch = scratch or Scratch(torch.device("cpu"))
        routes = [
            _route(layout, index)
            for index, owner in enumerate(layout.owners)
            if owner.replica == replica and not layout.is_local(index)
        ]
        self.num_routed = len(routes)
        # What this rank sends to an owner lies in order of units, and what it receives, by sender and then unit.
        by_unit = {slab.units[0]: position for position, slab in enumerate(slabs) if not slab.is_local}
        sent = sorted((route for route in routes if route.index in by_unit), key=lambda route: route.owner_rank)
        self._send_order = [by_unit[route.index] for route in sent]
        owned = [route for route in routes if route.owner_rank == rank]
        self._stacks, self._arrivals = _arrivals(owned)
        num_ranks = layout.grid.num_ranks
        self._send_sizes, self._receive_sizes = [0] * num_ranks, [0] * num_ranks
        for route in sent:
            self._send_sizes[route.owner_rank] += _elements(route, rank)
        for arrival in self._arrivals:
            self._receive_sizes[arrival.sender] += arrival.size

    @property
    def send_order(self) -> list[int]:
        """Positions of the routed slabs in the order in which `launch` takes them."""
        return self._send_order

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave this rank in a step, both ways."""
        out = sum(size for peer, size in enumerate(self._send_sizes) if peer != self.rank)
        back = sum(size for peer, size in enumerate(self._receive_sizes) if peer != self.rank)
        return 2 * (out + back)

    def launch_to_owners(self, pieces: torch.Tensor) -> _Pending:
        """Sends the routed slabs: `pieces` holds them one after the other, in `send_order`, flat and in bf16."""
        return self._exchange(pieces, self._send_sizes, self._receive_sizes, name="received")

    def finish_to_owners(self, pending: _Pending) -> list[torch.Tensor]:
        """Waits, and returns the owned units in bf16, equal ones as one stack [M, R, C]."""
        received = pending.wait()
        stacks = [self._scratch.take(f"stack {number}", *shape) for number, shape in enumerate(self._stacks)]
        if stacks:
            parts = received.split([arrival.size for arrival in self._arrivals])
            torch._foreach_copy_(self._parts(stacks), list(parts))
        return stacks

    def launch_back(self, results: Sequence[torch.Tensor]) -> _Pending:
        """Sends the rows of owned units, in the stacks that came, back to where they are stored."""
        sizes = [arrival.size for arrival in self._arrivals]
        packed = self._scratch.take("sent back", sum(sizes))
        if sizes:
            torch._foreach_copy_(list(packed.split(sizes)), self._parts(results))
        return self._exchange(packed, self._receive_sizes, self._send_sizes, name="received back")

    def _parts(self, stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of the pieces in `stacks`, in the order of the received buffer."""
        flat = [stack.view(-1) for stack in stacks]
        return [flat[a.stack][a.start : a.start + a.size] for a in self._arrivals]

    def finish_back(self, pending: _Pending) -> torch.Tensor:
        """Waits, and returns the results of the routed slabs one after the other, in `send_order`."""
        return pending.wait()

    def _exchange(self, send: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], *, name: str) -> _Pending:
        received = self._scratch.take(name, sum(receive_sizes))
        work = dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=self.group, async_op=True)
        return _Pending(received, work, send)


@dataclass
class _Pending:
    """A collective under way; `sent` is kept alive until it is done."""

    received: torch.Tensor
    work: dist.Work | None
    sent: torch.Tensor

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


class ReplicaExchange:
    """Reduces gradients to each unit's owning replica, and spreads the owner's updates to all replicas.

    Slabs go in buckets of bounded size; inside a bucket each replica has one share, padded to the longest, so that one
    reduce-scatter (fp32) and one all-gather (bf16) do. Together they move the bytes of an all-reduce. Communication,
    over `group` (this rank in every replica): both collectives once a bucket. Memory: two buckets.
    """

    def __init__(
        self,
        slabs: Sequence[Slab],
        columns: Sequence[int],
        *,
        replica: int,
        num_replicas: int,
        group: dist.ProcessGroup,
        max_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self.slabs, self.replica, self.num_replicas, self.group = list(slabs), replica, num_replicas, group
        self._sizes = [(s.last - s.first) * (s.bottom - s.top) * columns[s.parameter] for s in self.slabs]
        self._buckets = replica_buckets(
            self._sizes,
            [slab.owner.replica for slab in self.slabs],
            num_replicas=num_replicas,
            max_elements=max_elements,
        )

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def bytes_sent(self) -> int:
        """Bytes that leave this rank in a step: the reduction in fp32 and the spreading in bf16."""
        shares = [self._share_size(bucket) for bucket in self._buckets]
        return sum(shares) * (self.num_replicas - 1) * (4 + 2)

    def reduce(self, grads_of: Callable[[Sequence[int]], AbstractContextManager[Sequence[torch.Tensor]]]) -> None:
        """Replaces, for slabs that this replica owns, the gradient by the sum over replicas, in place.

        `grads_of` gives the gradients of slabs by their positions, one bucket's at a time.
        """
        for bucket in self._buckets:
            with grads_of(bucket) as found:
                self._reduce_bucket(bucket, dict(zip(bucket, found, strict=True)))

    def _reduce_bucket(self, bucket: list[int], grads: dict[int, torch.Tensor]) -> None:
        share = self._share_size(bucket)
        packed = grads[bucket[0]].new_zeros(self.num_replicas * share, dtype=torch.float32)
        for position, start in self._offsets(bucket, share):
            packed[start : start + self._sizes[position]].copy_(grads[position].reshape(-1))
        summed = packed.new_empty(share)
        dist.reduce_scatter_single(summed, packed, group=self.group)
        for position, start in self._offsets(bucket, share):
            if self.slabs[position].owner.replica == self.replica:
                begin = start - self.replica * share
                part = summed[begin : begin + self._sizes[position]]
                grads[position].copy_(part.view(grads[position].shape))

    def spread(self, updates: dict[int, torch.Tensor], *, device: torch.device) -> Iterator[dict[int, torch.Tensor]]:
        """Yields, bucket by bucket, every slab's bf16 update (flat) by position; takes those that this replica owns."""
        for bucket in self._buckets:
            share = self._share_size(bucket)
            mine = torch.zeros(share, dtype=torch.bfloat16, device=device)
            for position, start in self._offsets(bucket, share):
                if self.slabs[position].owner.replica == self.replica:
                    begin = start - self.replica * share
                    mine[begin : begin + self._sizes[position]].copy_(updates.pop(position).reshape(-1))
            gathered = mine.new_empty(self.num_replicas * share)
            dist.all_gather_single(gathered, mine, group=self.group)
            yield {
                position: gathered[start : start + self._sizes[position]]
                for position, start in self._offsets(bucket, share)
            }

    def _share_size(self, bucket: list[int]) -> int:
        totals = [0] * self.num_replicas
        for position in bucket:
            totals[self.slabs[position].owner.replica] += self._sizes[position]
        return max(totals)

    def _offsets(self, bucket: list[int], share: int) -> Iterator[tuple[int, int]]:
        """Each slab's position and where it begins in the bucket's buffer."""
        ends = [replica * share for replica in range(self.num_replicas)]
        for position in bucket:
            replica = self.slabs[position].owner.replica
            yield position, ends[replica]
            ends[replica] += self._sizes[position]


def _route(layout: Layout, index: int) -> _Route:
    unit = layout.units[index]
    columns = layout.parameters[unit.parameter].columns
    pieces = tuple(layout.pieces(unit))
    return _Route(index, unit.stop - unit.start, columns, layout.owners[index].rank, unit.start, pieces)


def _arrivals(owned: Sequence[_Route]) -> tuple[list[tuple[int, int, int]], list[_Arrival]]:
    """Shapes of the stacks of equal units, and what each sender's pieces fill of them, in the order received."""
    by_shape: dict[tuple[int, int], list[_Route]] = defaultdict(list)
    for route in owned:
        by_shape[route.rows, route.columns].append(route)
    arrivals = [
        _Arrival(
            sender=piece.rank,
            unit=route.index,
            stack=stack,
            start=(place * rows + piece.start - route.start) * columns,
            size=(piece.stop - piece.start) * columns,
        )
        for stack, ((rows, columns), routes) in enumerate(by_shape.items())
        for place, route in enumerate(routes)
        for piece in route.pieces
    ]
    return [(len(routes), *shape) for shape, routes in by_shape.items()], sorted(arrivals)


def _elements(route: _Route, rank: int) -> int:
    return sum((piece.stop - piece.start) * route.columns for piece in route.pieces if piece.rank == rank)
