"""Who is measured: our optimizers and the peers, each on each part of the workload, with the same settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import peers
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from workload import Part, Source, Tensors, Workload

from amalthea.flexshard.layout import Grid
from amalthea.optim.build import Optimizers, Place
from amalthea.optim.config import MuonConfig, OptimConfig

SETTINGS: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "nesterov": True, "ns_steps": 5}
"""Every side's; all use the quintic coefficients, which are the only ones that all have, and fp32 momentum."""

PARTS: tuple[Part, ...] = ("experts", "dense", "both")
OURS = "ours"
TORCH = "torch.optim.Muon"
PEERS = ("torchtitan", "muon-fsdp2", "torch")


@dataclass
class Side:
    """One optimizer on one part; times in seconds, one a round. A slow one has fewer rounds and no warm-up."""

    name: str
    part: Part
    tensors: Tensors
    step: Callable[[], None]
    max_rounds: int
    is_slow: bool = False
    bytes_sent: float = 0.0
    num_collectives: int = 0
    cosine: float = 1.0
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Any]:
        names = ("name", "part", "bytes_sent", "num_collectives", "cosine", "wall_s", "cpu_s")
        return {name: getattr(self, name) for name in names}


class Ours:
    """The trainer's optimizers, from FSDP's parameters; called as a training step calls them."""

    def __init__(self, tensors: Tensors, *, form: str) -> None:
        renamed = {"ns_steps": "num_steps"}
        muon = MuonConfig(form=form, **{renamed.get(key, key): value for key, value in SETTINGS.items()})  # type: ignore[arg-type]
        place = Place(
            grid=Grid(1, dist.get_world_size()),
            rank=dist.get_rank(),
            shard_group=dist.group.WORLD,
            all_ranks=dist.group.WORLD,
        )
        self.optimizers = Optimizers(tensors.parameters.items(), OptimConfig(muon=muon), place=place)

    def __call__(self) -> None:
        self.optimizers.reduce_over_replicas()
        self.optimizers.step(lr_factor=1.0)


def make_sides(
    workload: Workload, mesh: DeviceMesh, *, chosen: tuple[str, ...], rounds: int, torch_rounds: int
) -> list[Side]:
    builders: dict[str, Callable[[Tensors], Callable[[], None]]] = {
        OURS: partial(Ours, form="standard"),
        f"{OURS}, Gram form": partial(Ours, form="gram"),
    }
    if "torchtitan" in chosen:
        for title, size in (("TorchTitan build_dist_muon", 2), ("TorchTitan, one bucket", 0)):
            builders[title] = partial(peers.torchtitan, settings=SETTINGS, layers_per_bucket=size)
    if "muon-fsdp2" in chosen:
        builders["muon-fsdp2"] = partial(peers.muon_fsdp2, settings=SETTINGS)
    source = Source(workload, mesh)
    sides = []
    for part in PARTS:
        for name, build in builders.items():
            tensors = source.make(part)
            sides.append(Side(name, part, tensors, build(tensors), rounds))
    if "torch" in chosen:
        for part in PARTS[:2]:
            tensors = source.make(part, cut_stacks=True)
            step = peers.torch_muon(tensors, SETTINGS)
            sides.append(Side(TORCH, part, tensors, step, torch_rounds, is_slow=True))
    return sides
