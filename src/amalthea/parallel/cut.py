"""Whether a mesh leaves experts whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amalthea.flexshard.layout import Grid

if TYPE_CHECKING:
    from amalthea.parallel.mesh import Mesh


def experts_are_cut(mesh: Mesh | Grid, *, num_experts: int, sizes: tuple[int, ...]) -> bool:
    """Whether FSDP must cut inside experts: more ranks hold a copy than it has experts, and the rows divide evenly.

    Where they do not divide, experts stay whole and ranks that get none idle. `sizes` are the rows of the stacks.
    """
    return mesh.efsdp > num_experts // mesh.ep and all(size % mesh.efsdp == 0 for size in sizes)
