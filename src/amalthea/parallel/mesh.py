"""The mesh of ranks and its axes.

`dp_replicate · dp_shard` ranks; `dp_shard` splits into `efsdp · ep` for the routed experts. Neighbouring ranks
differ in `ep` first, so that expert parallelism stays inside a node. Two views of the same ranks:

    dense    dp_replicate × dp_shard          everything but the routed experts
    experts  dp_replicate × efsdp × ep        the routed experts
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from amalthea.core.world import World


@dataclass(frozen=True)
class Mesh:
    """The two views, and this rank's place in them."""

    dense: DeviceMesh
    experts: DeviceMesh

    @property
    def dp_replicate(self) -> int:
        return self.dense["dp_replicate"].size()

    @property
    def dp_shard(self) -> int:
        return self.dense["dp_shard"].size()

    @property
    def ep(self) -> int:
        return self.experts["ep"].size()

    @property
    def efsdp(self) -> int:
        return self.experts["efsdp"].size()

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this rank takes; every rank takes another one."""
        return self.dense["dp_replicate"].get_local_rank() * self.dp_shard + self.dense["dp_shard"].get_local_rank()

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    def coordinates(self) -> dict[str, int]:
        """This rank's index on every axis."""
        return {
            axis: view[axis].get_local_rank()
            for axis, view in (
                ("dp_replicate", self.dense),
                ("dp_shard", self.dense),
                ("efsdp", self.experts),
                ("ep", self.experts),
            )
        }


def build_mesh(world: World, *, dp_replicate: int, dp_shard: int, ep: int) -> Mesh:
    """Makes both views over all ranks; the degrees must have been checked (`config/check.py`).

    Communication: process groups are created on every rank together.
    """
    assert dist.is_initialized()
    assert dp_replicate * dp_shard == world.size
    assert dp_shard % ep == 0
    dense = init_device_mesh(world.device, (dp_replicate, dp_shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    experts = init_device_mesh(
        world.device, (dp_replicate, dp_shard // ep, ep), mesh_dim_names=("dp_replicate", "efsdp", "ep")
    )
    return Mesh(dense, experts)
