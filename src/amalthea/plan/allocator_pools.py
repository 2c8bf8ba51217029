"""A model of PyTorch's caching allocator for CUDA: blocks, pools and segments, without a device.

Nouns. A *segment* is memory asked of the device at once; *blocks* are its parts, side by side, each in use or free. A
*pool* holds the free blocks of one stream and size class (small: up to 1 MiB); a block never leaves its pool. An
*expandable* segment is one range of addresses per pool of which *pages* are mapped when needed; a block there may be
unmapped. Addresses here grow from segment to segment, which settles ties between blocks of one size as the real
allocator's addresses often do, not always.

Source: the documented behaviour of torch 2.13's CUDA caching allocator, and its constants.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from amalthea.core.errors import ConfigError
from amalthea.core.units import GIB

MIB = 1024**2
MIN_BLOCK = 512
SMALL_REQUEST = MIB
"""The largest request that the small pool takes, and what a rest must exceed for a large block to be split."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
"""Of requests up to 1 MiB and under 10 MiB; also the pages of expandable segments."""
LARGE_REQUEST = 10 * MIB
ROUND_LARGE = 2 * MIB
_ADDRESSES = 1 << 47
"""Size of an expandable segment's range: never the limit."""


def round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class AllocatorSettings:
    """What PYTORCH_CUDA_ALLOC_CONF sets, and how much memory there is.

    `cap_gib` is what the allocator may reserve: the memory that the process sees, less the device's context and what
    communication libraries take; none for no limit. `garbage_collection_threshold` is a fraction of the cap; blocks
    from `max_split_size_mib` on are not split.
    Raises ConfigError where a value is out of range.
    """

    expandable_segments: bool = False
    cap_gib: float | None = None
    garbage_collection_threshold: float | None = None
    max_split_size_mib: int | None = None

    def __post_init__(self) -> None:
        threshold, split = self.garbage_collection_threshold, self.max_split_size_mib
        problems = []
        if self.cap_gib is not None and self.cap_gib <= 0:
            problems.append(f"cap_gib is {self.cap_gib:g}; give a positive number of GiB, or none for no limit")
        if threshold is not None and not 0 < threshold < 1:
            problems.append(f"garbage_collection_threshold is {threshold:g}; give a fraction between 0 and 1")
        if split is not None and split <= LARGE_SEGMENT // MIB:
            problems.append(f"max_split_size_mib is {split}; give more than {LARGE_SEGMENT // MIB}")
        if problems:
            raise ConfigError(*problems)

    @property
    def cap_bytes(self) -> int | None:
        return None if self.cap_gib is None else int(self.cap_gib * GIB)


class Block:
    """Part of a segment; `previous` and `next` are its neighbours there."""

    __slots__ = ("expandable", "free", "freed_at", "mapped", "next", "pool", "previous", "size", "start")

    def __init__(self, pool: Pool, start: int, size: int, *, expandable: bool, mapped: bool) -> None:
        self.pool, self.start, self.size = pool, start, size
        self.expandable, self.mapped = expandable, mapped
        self.previous: Block | None = None
        self.next: Block | None = None
        self.free = True
        self.freed_at = 0

    @property
    def whole(self) -> bool:
        """Nothing else is in its segment."""
        return self.previous is None and self.next is None

    def room(self) -> int:
        """Bytes that it has or, at the growing end of an expandable segment, could have."""
        after = self.next
        return self.size + (after.size if after is not None and not after.mapped else 0)

    def split(self, size: int) -> Block:
        """Cuts it to `size`, and returns the rest as its next neighbour."""
        rest = Block(self.pool, self.start + size, self.size - size, expandable=self.expandable, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next, self.size = rest, size
        return rest


@dataclass
class Pool:
    """Free blocks of one stream and size class, best fit first; `unmapped` by address."""

    stream: str
    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)
    reserved: int = 0
    allocated: int = 0

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def insert(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.start, block))
        else:
            insort(self.unmapped, (block.start, block))

    def remove(self, block: Block) -> None:
        # A tuple that lacks the block sorts just before the one that has it.
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.start))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.start,))]

    def merge_into(self, block: Block) -> None:
        """Joins free neighbours of the same kind to `block`, which is in no list."""
        before, after = block.previous, block.next
        if before is not None and before.free and before.mapped == block.mapped:
            self.remove(before)
            block.start, block.size, block.previous = before.start, before.size + block.size, before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.free and after.mapped == block.mapped:
            self.remove(after)
            block.size, block.next = block.size + after.size, after.next
            if block.next is not None:
                block.next.previous = block


class CachingAllocator:
    """Allocates and frees; `None` from `allocate` is out of memory. Figures are bytes of now."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.pools: dict[tuple[str, bool], Pool] = {}
        self.reserved = 0
        self.allocated = 0
        self.num_retries = 0
        """Times that everything cached was given back to satisfy one request (`num_alloc_retries`)."""
        self.num_device_allocations = 0
        self._next_address = 0
        self._clock = 0
        self._cap = settings.cap_bytes
        split = settings.max_split_size_mib
        self._max_split = None if split is None else split * MIB
        threshold = settings.garbage_collection_threshold
        self._collect_above = None if threshold is None or self._cap is None else int(threshold * self._cap)

    def allocate(self, num_bytes: int, stream: str) -> Block | None:
        """A block of at least `num_bytes`, in use; none where it does not fit under the cap."""
        size = max(MIN_BLOCK, round_up(num_bytes, MIN_BLOCK))
        pool = self._pool(stream, small=size <= SMALL_REQUEST)
        # Ages count requests of large blocks: only these are collected.
        self._clock += not pool.small
        block = self._best_fit(pool, size) or self._from_device(pool, size)
        if block is None:
            return None
        rest = block.size - size
        if self._may_split(pool, size, rest):
            pool.insert(block.split(size))
        block.free = False
        pool.allocated += block.size
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Frees a block: its pool may hand it out again at once."""
        pool = block.pool
        pool.allocated -= block.size
        self.allocated -= block.size
        block.free = True
        block.freed_at = self._clock
        pool.merge_into(block)
        pool.insert(block)

    def give_back(self) -> None:
        """Returns to the device whatever is whole and free, as `torch.cuda.empty_cache` does."""
        for pool in self.pools.values():
            for _, _, block in list(pool.free):
                if block.expandable:
                    self._unmap(block)
                elif block.whole:
                    self._drop(block)

    def _pool(self, stream: str, *, small: bool) -> Pool:
        key = (stream, small)
        if key not in self.pools:
            self.pools[key] = Pool(stream, small)
        return self.pools[key]

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        free, at = pool.free, bisect_left(pool.free, (size,))
        if at == len(free):
            return None
        if self.settings.expandable_segments:
            # A block that may grow counts with what it can grow to, so that it is kept for what needs it.
            while at + 1 < len(free) and free[at + 1][2].room() < free[at][2].room():
                at += 1
        block, limit = free[at][2], self._max_split
        if limit is not None:
            oversized = block.size >= limit
            if (oversized and size < limit) or (size >= limit and block.size >= size + LARGE_SEGMENT):
                return None
        del free[at]
        return block

    def _may_split(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        return rest > SMALL_REQUEST and (self._max_split is None or size < self._max_split)

    def _from_device(self, pool: Pool, size: int) -> Block | None:
        self._collect_garbage()
        block = self._grow(pool, size)
        if block is None and self._drop_oversized(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.give_back()
            self.num_retries += 1
            block = self._grow(pool, size)
        return block

    def _grow(self, pool: Pool, size: int) -> Block | None:
        return self._map(pool, size) if self.settings.expandable_segments else self._new_segment(pool, size)

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        segment = pool.page if size < LARGE_REQUEST else round_up(size, ROUND_LARGE)
        if not self._reserve(pool, segment):
            return None
        return Block(pool, self._addresses(segment), segment, expandable=False, mapped=True)

    def _map(self, pool: Pool, size: int) -> Block | None:
        """Maps pages until a block of `size` is there, and takes it out of its pool."""
        block = self._growing_block(pool, size)
        if not block.mapped and not self._map_pages(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.next
            assert after is not None
            if not self._map_pages(after, min(size - block.size, after.size)):
                return None
            block = after
        pool.remove(block)
        return block

    def _growing_block(self, pool: Pool, size: int) -> Block:
        """The first free or unmapped block after which, with its free neighbours, there is room for `size`."""
        for _, block in pool.unmapped:
            before = block.previous
            first = before if before is not None and before.free else block
            room, at = 0, first
            while at is not None and at.free and room < size:
                room, at = room + at.size, at.next
            if room >= size:
                return first
        block = Block(pool, self._addresses(_ADDRESSES), _ADDRESSES, expandable=True, mapped=False)
        pool.insert(block)
        return block

    def _map_pages(self, block: Block, size: int) -> bool:
        size = round_up(size, block.pool.page)
        if not self._reserve(block.pool, size):
            return False
        pool = block.pool
        pool.remove(block)
        if size < block.size:
            pool.insert(block.split(size))
        block.mapped = True
        block.freed_at = self._clock
        pool.merge_into(block)
        pool.insert(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Gives back the pages that lie wholly within a free block."""
        pool, page = block.pool, block.pool.page
        first, end = round_up(block.start, page), (block.start + block.size) // page * page
        if first >= end:
            return
        pool.remove(block)
        if first > block.start:
            before, block = block, block.split(first - block.start)
            pool.insert(before)
        if end < block.start + block.size:
            pool.insert(block.split(end - block.start))
        block.mapped = False
        pool.merge_into(block)
        pool.insert(block)
        self._unreserve(pool, end - first)

    def _drop(self, block: Block) -> None:
        block.pool.remove(block)
        self._unreserve(block.pool, block.size)

    def _drop_oversized(self, pool: Pool, size: int) -> bool:
        """With a largest size to split: gives back just enough of the blocks that are kept whole."""
        limit = self._max_split
        if limit is None or self.settings.expandable_segments:
            return False
        wanted = max(size, limit)
        at = bisect_left(pool.free, (wanted,))
        if at < len(pool.free):
            self._drop(pool.free[at][2])
            return True
        dropped = 0
        while dropped < wanted and pool.free and pool.free[-1][0] >= limit:
            dropped += pool.free[-1][0]
            self._drop(pool.free[-1][2])
        return dropped >= wanted

    def _collect_garbage(self) -> None:
        """Above the threshold, gives back whole large blocks that have been free for longer than their average."""
        if self._collect_above is None or self.reserved <= self._collect_above:
            return
        wanted = self.reserved - self._collect_above
        found = [b for p in self.pools.values() if not p.small for _, _, b in p.free if b.whole and not b.expandable]
        while wanted > 0 and found:
            average = sum(self._clock - block.freed_at for block in found) / len(found)
            old = [block for block in found if self._clock - block.freed_at >= average]
            for block in old:
                wanted -= block.size
                self._drop(block)
            found = [block for block in found if self._clock - block.freed_at < average]

    def _addresses(self, size: int) -> int:
        start = self._next_address
        self._next_address += round_up(size, LARGE_SEGMENT)
        return start

    def _reserve(self, pool: Pool, size: int) -> bool:
        if self._cap is not None and self.reserved + size > self._cap:
            return False
        pool.reserved += size
        self.reserved += size
        self.num_device_allocations += 1
        return True

    def _unreserve(self, pool: Pool, size: int) -> None:
        pool.reserved -= size
        self.reserved -= size
