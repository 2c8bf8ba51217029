"""The allocator model against what PyTorch documents of its own, and against a plain one that shares no code."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amalthea.core.errors import ConfigError
from amalthea.plan.allocator_pools import MIB, AllocatorSettings, Block, CachingAllocator

KIB = 1024


def allocator(**values: object) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings(**values))  # type: ignore[arg-type]


def allocate(of: CachingAllocator, num_bytes: int, stream: str = "compute") -> Block:
    block = of.allocate(num_bytes, stream)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (0, 512, 2 * MIB),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # A rest of up to 1 MiB is not split off: it counts as allocated.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (1001 * MIB, 1002 * MIB, 1002 * MIB),
    ],
)
def test_sizes_are_rounded_and_segments_asked_for_by_size(asked: int, allocated: int, reserved: int) -> None:
    found = allocator()
    allocate(found, asked)
    assert (found.allocated, found.reserved) == (allocated, reserved)


def test_small_blocks_share_a_segment_and_leave_large_ones_alone() -> None:
    found = allocator()
    for _ in range(4):
        allocate(found, 512 * KIB)
    assert found.reserved == 2 * MIB
    allocate(found, 512)
    assert found.reserved == 4 * MIB
    allocate(found, 2 * MIB)
    assert found.reserved == 24 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    found = allocator()
    large, small, middle = (allocate(found, size * MIB) for size in (60, 20, 40))
    for block in (large, small, middle):
        found.release(block)
    assert allocate(found, 30 * MIB).start == middle.start
    assert found.reserved == 120 * MIB


def test_a_large_block_is_split_only_where_more_than_a_mebibyte_is_left() -> None:
    for asked, taken in ((30 * MIB, 30 * MIB), (31 * MIB, 32 * MIB), (31 * MIB - 512, 31 * MIB - 512)):
        found = allocator()
        found.release(allocate(found, 32 * MIB))
        assert allocate(found, asked).size == taken
        assert found.reserved == 32 * MIB


def test_streams_do_not_share() -> None:
    found = allocator()
    found.release(allocate(found, 30 * MIB, "gather"))
    allocate(found, 30 * MIB, "compute")
    assert found.reserved == 60 * MIB
    gather = found.pools["gather", False]
    assert (gather.reserved, gather.allocated) == (30 * MIB, 0)


def test_free_neighbours_of_a_segment_merge_and_segments_do_not() -> None:
    found = allocator()
    parts = [allocate(found, 5 * MIB) for _ in range(4)]
    assert found.reserved == 20 * MIB
    for index in (1, 3, 2, 0):
        found.release(parts[index])
    assert allocate(found, 19 * MIB + 1).size == 20 * MIB
    assert found.reserved == 20 * MIB

    apart = allocator()
    for block in [allocate(apart, 10 * MIB) for _ in range(2)]:
        apart.release(block)
    allocate(apart, 20 * MIB)
    assert apart.reserved == 40 * MIB


def test_under_a_cap_everything_cached_goes_back_before_memory_is_out() -> None:
    found = allocator(cap_gib=50 / 1024)
    found.release(allocate(found, 30 * MIB, "gather"))
    allocate(found, 40 * MIB)
    assert (found.num_retries, found.reserved) == (1, 40 * MIB)
    assert found.allocate(12 * MIB, "compute") is None
    # PyTorch counts a retry that fails, too.
    assert (found.num_retries, found.reserved) == (2, 40 * MIB)


def test_a_segment_of_which_a_part_is_in_use_cannot_go_back() -> None:
    found = allocator(cap_gib=40 / 1024)
    rest, kept = allocate(found, 8 * MIB, "gather"), allocate(found, 8 * MIB, "gather")
    found.release(rest)
    assert found.allocate(22 * MIB, "compute") is None
    found.release(kept)
    assert allocate(found, 22 * MIB).size == 22 * MIB
    assert found.reserved == 22 * MIB


def test_expandable_segments_grow_by_pages_and_leave_no_splinters() -> None:
    """30 MiB, freed, then 50 MiB: segments of their own 80 MiB; pages of 20 MiB under both 60."""
    for expandable, reserved in ((False, 80), (True, 60)):
        found = allocator(expandable_segments=expandable)
        found.release(allocate(found, 30 * MIB))
        allocate(found, 50 * MIB)
        assert found.reserved == reserved * MIB
    small = allocator(expandable_segments=True)
    allocate(small, 3 * 512)
    assert small.reserved == 2 * MIB


def test_expandable_segments_split_from_512_bytes_on() -> None:
    found = allocator(expandable_segments=True)
    found.release(allocate(found, 40 * MIB))
    block = allocate(found, 40 * MIB - 512)
    assert block.size == 40 * MIB - 512
    assert found.allocated == 40 * MIB - 512


def test_expandable_segments_strand_memory_on_another_stream_all_the_same() -> None:
    found = allocator(expandable_segments=True)
    found.release(allocate(found, 40 * MIB, "gather"))
    allocate(found, 40 * MIB, "compute")
    assert found.reserved == 80 * MIB


def test_whole_free_pages_go_back_around_what_is_in_use() -> None:
    found = allocator(expandable_segments=True, cap_gib=120 / 1024)
    first, kept, last = (allocate(found, size * MIB, "gather") for size in (50, 10, 60))
    assert found.reserved == 120 * MIB
    found.release(first)
    found.release(last)
    # Pages 0 to 40 and 60 to 120 MiB are free; the one with 40 to 60 holds the block from 50 on.
    allocate(found, 90 * MIB, "compute")
    assert (found.num_retries, found.reserved) == (1, 120 * MIB)
    assert found.pools["gather", False].reserved == 20 * MIB
    # The holes are mapped again when the stream wants them, lowest first.
    assert allocate(found, 5 * MIB, "gather").start == first.start + 40 * MIB
    assert kept.size == 10 * MIB


def test_garbage_is_collected_above_the_threshold_oldest_first_and_without_a_retry() -> None:
    found = allocator(cap_gib=100 / 1024, garbage_collection_threshold=0.5)
    found.release(allocate(found, 30 * MIB, "a"))
    for _ in range(5):
        found.release(allocate(found, 30 * MIB, "b"))
    allocate(found, 32 * MIB, "c")
    assert found.num_retries == 0
    assert found.pools["a", False].reserved == 0
    assert found.pools["b", False].reserved == 30 * MIB


def test_blocks_above_the_largest_size_to_split_stay_whole() -> None:
    found = allocator(max_split_size_mib=100, cap_gib=1)
    found.release(allocate(found, 200 * MIB))
    allocate(found, 50 * MIB)
    assert found.reserved == 250 * MIB
    assert allocate(found, 190 * MIB).size == 200 * MIB, "not more than 20 MiB are given away"
    found = allocator(max_split_size_mib=100, cap_gib=0.5)
    kept = allocate(found, 50 * MIB)
    for block in [allocate(found, size * MIB) for size in (120, 150, 180)]:
        found.release(block)
    assert found.reserved == 500 * MIB
    # 150 MiB is more than 20 MiB too large, so it is not handed out, and is what goes back for a new segment.
    assert allocate(found, 125 * MIB).size == 126 * MIB
    assert (found.num_retries, found.reserved) == (0, (500 - 150 + 126) * MIB)
    # No single block is large enough: the largest go back until it is.
    allocate(found, 300 * MIB)
    assert (found.num_retries, found.reserved) == (0, (50 + 126 + 300) * MIB)
    assert kept.size == 50 * MIB


def test_settings_say_what_is_wrong_with_them() -> None:
    with pytest.raises(
        ConfigError, match=r"cap_gib is -1; .*garbage_collection_threshold is 2;.*max_split_size_mib is 4"
    ):
        AllocatorSettings(cap_gib=-1, garbage_collection_threshold=2, max_split_size_mib=4)


@dataclass
class PlainAllocator:
    """The same rules without pools, addresses or neighbours: segments are lists of [size, number or None]."""

    cap: int
    segments: list[tuple[str, bool, list[list[int | None]]]] = field(default_factory=list)
    retries: int = 0

    def reserved(self) -> int:
        return sum(size or 0 for _, _, parts in self.segments for size, _ in parts)

    def allocate(self, number: int, num_bytes: int, stream: str) -> bool:
        size = max(512, (num_bytes + 511) // 512 * 512)
        small = size <= MIB
        if self._take(number, size, stream, small):
            return True
        wanted = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        if self.reserved() + wanted > self.cap:
            self.retries += 1
            self.segments = [s for s in self.segments if len(s[2]) > 1 or s[2][0][1] is not None]
        if self.reserved() + wanted > self.cap:
            return False
        self.segments.append((stream, small, [[wanted, None]]))
        return self._take(number, size, stream, small)

    def _take(self, number: int, size: int, stream: str, small: bool) -> bool:
        fits = [
            (part[0], at, place)
            for at, (of, kind, parts) in enumerate(self.segments)
            for place, part in enumerate(parts)
            if of == stream and kind == small and part[1] is None and (part[0] or 0) >= size
        ]
        if not fits:
            return False
        have, at, place = min(fits)  # type: ignore[type-var]
        rest = (have or 0) - size
        parts = self.segments[at][2]
        if rest >= 512 if small else rest > MIB:
            parts[place : place + 1] = [[size, number], [rest, None]]
        else:
            parts[place][1] = number
        return True

    def free(self, number: int) -> None:
        for _, _, parts in self.segments:
            for part in parts:
                if part[1] == number:
                    part[1] = None
            for place in range(len(parts) - 1, 0, -1):
                if parts[place][1] is None and parts[place - 1][1] is None:
                    parts[place - 1][0] = (parts[place - 1][0] or 0) + (parts.pop(place)[0] or 0)


SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 100).map(lambda n: n * MIB // 2), st.just(0))
STEPS = st.lists(st.tuples(SIZES, st.sampled_from(("compute", "gather")), st.integers(0, 3)), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, cap_mib=st.integers(20, 400))
def test_it_does_what_a_plain_allocator_does(steps: list[tuple[int, str, int]], cap_mib: int) -> None:
    found, plain, live = allocator(cap_gib=cap_mib / 1024), PlainAllocator(cap_mib * MIB), dict[int, Block]()
    for number, (num_bytes, stream, frees) in enumerate(steps):
        block = found.allocate(num_bytes, stream)
        assert (block is not None) == plain.allocate(number, num_bytes, stream)
        if block is not None:
            live[number] = block
        for _ in range(min(frees, len(live)) if frees > 1 else 0):
            gone = sorted(live)[num_bytes % len(live)]
            found.release(live.pop(gone))
            plain.free(gone)
        assert found.reserved == plain.reserved()
        assert found.num_retries == plain.retries


def check_whole(found: CachingAllocator, live: dict[int, Block]) -> None:
    """What must hold at any time, from the blocks themselves."""
    blocks = {id(block): block for block in live.values()}
    for (stream, small), pool in found.pools.items():
        assert [entry[:2] for entry in pool.free] == sorted(entry[:2] for entry in pool.free)
        for size, start, block in pool.free:
            assert (size, start, True, True) == (block.size, block.start, block.free, block.mapped)
            blocks[id(block)] = block
        for start, block in pool.unmapped:
            assert (start, True, False) == (block.start, block.free, block.mapped)
            blocks[id(block)] = block
        mine = [block for block in blocks.values() if block.pool is pool]
        assert pool.reserved == sum(block.size for block in mine if block.mapped)
        assert pool.allocated == sum(block.size for block in mine if not block.free)
        assert (pool.stream, pool.small) == (stream, small)
    assert found.reserved == sum(pool.reserved for pool in found.pools.values())
    assert found.allocated == sum(block.size for block in live.values())
    assert found.reserved >= found.allocated
    ordered = sorted(blocks.values(), key=lambda block: block.start)
    for before, after in pairwise(ordered):
        assert before.start + before.size <= after.start, "blocks overlap"
        if before.next is not None:
            assert before.next is after
            assert after.previous is before
            assert before.start + before.size == after.start, "bytes are lost"
            assert not (before.free and after.free and before.mapped == after.mapped), "not merged"


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, cap_mib=st.integers(60, 400), expandable=st.booleans(), collect=st.booleans(), limit=st.booleans())
def test_blocks_never_overlap_and_bytes_are_conserved(
    steps: list[tuple[int, str, int]], cap_mib: int, expandable: bool, collect: bool, limit: bool
) -> None:
    chosen = AllocatorSettings(
        expandable_segments=expandable,
        cap_gib=cap_mib / 1024,
        garbage_collection_threshold=0.6 if collect else None,
        max_split_size_mib=24 if limit else None,
    )
    twins = CachingAllocator(chosen), CachingAllocator(chosen)
    lives: tuple[dict[int, Block], dict[int, Block]] = {}, {}
    for number, (num_bytes, stream, frees) in enumerate(steps):
        for found, live in zip(twins, lives, strict=True):
            block = found.allocate(num_bytes, stream)
            if block is not None:
                assert block.size >= num_bytes
                live[number] = block
            for _ in range(min(frees, len(live)) if frees > 1 else 0):
                found.release(live.pop(sorted(live)[num_bytes % len(live)]))
            check_whole(found, live)
            assert found.reserved <= cap_mib * MIB
        assert [b.start for b in lives[0].values()] == [b.start for b in lives[1].values()], "not deterministic"
        assert twins[0].reserved == twins[1].reserved
    found, live = twins[0], lives[0]
    for number in sorted(live):
        found.release(live.pop(number))
        check_whole(found, live)
    assert found.allocated == 0
    if not expandable:
        assert all(block.whole for pool in found.pools.values() for _, _, block in pool.free)
    found.give_back()
    assert found.reserved == 0
    assert not any(pool.free for pool in found.pools.values())
