"""The mesh of ranks and its axes.

`dp_replicate` replicas of `fsdp = dp_shard · cp = efsdp · ep` ranks. Neighbouring ranks differ in `cp` and in `ep`
first, so that both kinds of all-to-all stay inside a node. Views of the same ranks:

    dense      dp_replicate × fsdp              everything but the routed experts
    experts    dp_replicate × efsdp × ep        the routed experts
    sequences  dp_replicate × dp_shard × cp     who reads which sequences, and which part of them
    dispatch   the axis ep as node × local      only where tokens travel by node
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from amalthea.core.world import World


@dataclass(frozen=True)
class Mesh:
    """The views, and this rank's place in them."""

    dense: DeviceMesh
    experts: DeviceMesh
    sequences: DeviceMesh
    dispatch: DeviceMesh | None = None

    @property
    def dp_replicate(self) -> int:
        return self.dense["dp_replicate"].size()

    @property
    def fsdp(self) -> int:
        """Ranks over which the parameters of one replica are sharded."""
        return self.dense["fsdp"].size()

    @property
    def dp_shard(self) -> int:
        return self.sequences["dp_shard"].size()

    @property
    def cp(self) -> int:
        return self.sequences["cp"].size()

    @property
    def ep(self) -> int:
        return self.experts["ep"].size()

    @property
    def efsdp(self) -> int:
        return self.experts["efsdp"].size()

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this rank takes; ranks that differ in `cp` alone take the same one."""
        replica, shard = (self.sequences.get_local_rank(axis) for axis in ("dp_replicate", "dp_shard"))
        return replica * self.dp_shard + shard

    @property
    def cp_rank(self) -> int:
        """Which part of its sequences' positions this rank takes."""
        return self.sequences.get_local_rank("cp")

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    def coordinates(self) -> dict[str, int]:
        """This rank's index on every axis."""
        return {
            axis: view[axis].get_local_rank()
            for axis, view in (
                ("dp_replicate", self.dense),
                ("dp_shard", self.sequences),
                ("cp", self.sequences),
                ("efsdp", self.experts),
                ("ep", self.experts),
            )
        }


def build_mesh(
    world: World, *, dp_replicate: int, dp_shard: int, ep: int, cp: int = 1, node_ranks: int | None = None
) -> Mesh:
    """Makes the views over all ranks; the degrees must have been checked (`config/check.py`).

    `node_ranks` is how many ranks of the axis `ep` lie on one node, none where tokens are sent without regard to it.

    Communication: process groups are created on every rank together.
    """
    assert dist.is_initialized()
    fsdp = dp_shard * cp
    assert dp_replicate * fsdp == world.size
    assert fsdp % ep == 0

    def view(**axes: int) -> DeviceMesh:
        return init_device_mesh(world.device, tuple(axes.values()), mesh_dim_names=tuple(axes))

    dispatch = None
    if node_ranks is not None:
        assert ep % node_ranks == 0
        by_node = view(dp_replicate=dp_replicate, efsdp=fsdp // ep, node=ep // node_ranks, local=node_ranks)
        dispatch = by_node["node", "local"]
    return Mesh(
        dispatch=dispatch,
        dense=view(dp_replicate=dp_replicate, fsdp=fsdp),
        experts=view(dp_replicate=dp_replicate, efsdp=fsdp // ep, ep=ep),
        sequences=view(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp),
    )
