"""What of a GPU's and its host's memory a run may take."""

from __future__ import annotations

from dataclasses import dataclass

from amalthea.core.units import GIB
from amalthea.plan.clusters import Cluster

VISIBLE_OF_NAMED = 0.99
"""Vendors' "GB" of HBM are GiB less about this much: 95.6 GiB of a GH200's 96, 139.8 of an H200's 141."""


@dataclass(frozen=True)
class Reserves:
    """What others than the allocator take. Ours, unmeasured."""

    device_gib: float = 4.0
    """CUDA's context, and the buffers of NCCL's communicators."""
    host_fraction: float = 0.85
    """Of host memory, for boundaries and optimizer state; the rest is for the system, processes and data."""

    def lines(self) -> tuple[str, ...]:
        """In words."""
        return (
            f"{self.device_gib:g} GiB of device memory for CUDA's context and NCCL (ours, unmeasured)",
            f"{self.host_fraction:.0%} of host memory may hold boundaries and state (ours, unmeasured)",
        )


def visible_gib(cluster: Cluster) -> float:
    """Device memory that a process sees."""
    return cluster.hbm_visible_gib or cluster.hbm_gb * VISIBLE_OF_NAMED


def device_cap_gib(cluster: Cluster, reserves: Reserves) -> float:
    """What the allocator may reserve, GiB; at least a hundredth of what is visible."""
    return max(visible_gib(cluster) - reserves.device_gib, 0.01 * visible_gib(cluster))


def host_cap_bytes(cluster: Cluster, reserves: Reserves) -> int:
    """Host memory that one rank may take, bytes."""
    return int(cluster.host_gb * 1e9 * reserves.host_fraction)


def gib(num_bytes: float) -> float:
    """Bytes as GiB."""
    return num_bytes / GIB
