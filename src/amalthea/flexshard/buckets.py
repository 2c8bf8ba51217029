"""How a rank's slabs are grouped for the exchange between replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

BUCKET_ELEMENTS = 1 << 26
"""Of a rank's slabs that travel between replicas together, about."""


def buckets(sizes: Sequence[int], max_elements: int) -> Iterator[range]:
    """Neighbours of together at most `max_elements`, or one that is larger."""
    start = total = 0
    for position, size in enumerate(sizes):
        if total and total + size > max_elements:
            yield range(start, position)
            start, total = position, 0
        total += size
    if total:
        yield range(start, len(sizes))


def replica_buckets(
    sizes: Sequence[int], replicas: Sequence[int], *, num_replicas: int, max_elements: int
) -> list[list[int]]:
    """Positions that travel together, so that in each bucket every replica owns about as much.

    A bucket pads every replica's share to the longest. Each replica's slabs therefore fill shares of their own, of at
    most `max_elements / num_replicas` or one larger slab, and the first shares of all replicas make the first bucket.
    """
    owned: list[list[int]] = [[] for _ in range(num_replicas)]
    for position, replica in enumerate(replicas):
        owned[replica].append(position)
    shares = [
        [
            [positions[i] for i in share]
            for share in buckets([sizes[p] for p in positions], max_elements // num_replicas)
        ]
        for positions in owned
    ]
    return [
        sorted(position for of_replica in shares for position in (of_replica[i] if i < len(of_replica) else []))
        for i in range(max(map(len, shares), default=0))
    ]
