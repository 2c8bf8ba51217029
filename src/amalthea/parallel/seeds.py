"""One function for every rank's seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping


def seed_for(base_seed: int, *, purpose: str, coordinates: Mapping[str, int], distinct: Iterable[str] = ()) -> int:
    """A 63-bit seed that differs along the axes in `distinct` and is equal along all others.

    `purpose` keeps streams apart that share axes. `coordinates` is the rank's index on each axis
    (`Mesh.coordinates`). An axis that the mesh does not have is a KeyError.
    """
    place = ",".join(f"{axis}={coordinates[axis]}" for axis in sorted(distinct))
    digest = hashlib.blake2b(f"{base_seed}/{purpose}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
