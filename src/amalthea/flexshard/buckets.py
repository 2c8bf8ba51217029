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
