"""Distributed Muon on made-up parameters, placed by the planner's boxes on any grid, and its single-device twin.

Shape legend: E experts, R rows, C columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from amalthea.core.world import World
from amalthea.flexshard.layout import Grid, StoredParameter
from amalthea.flexshard.plan import plan_layout
from amalthea.optim.config import MuonConfig
from amalthea.optim.dist_muon import DistMuon
from amalthea.optim.flops import orthogonalize_flops
from amalthea.optim.muon import Muon
from support.collectives import Collectives

Named = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Parameters on `grid`; `repeated` lets each of its replicas do all the work."""

    grid: Grid
    parameters: tuple[StoredParameter, ...]
    config: MuonConfig = field(default_factory=MuonConfig)
    repeated: bool = False
    num_steps: int = 1

    @property
    def num_ranks(self) -> int:
        return self.grid.num_replicas * self.grid.num_ranks

    @property
    def planned_grid(self) -> Grid:
        return Grid(1, self.grid.num_ranks, self.grid.ep) if self.repeated else self.grid


def draw(key: str, shape: Sequence[int]) -> torch.Tensor:
    """The same Gaussians for a key in every process."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


def weight_of(stored: StoredParameter) -> torch.Tensor:
    return draw(stored.name, stored.shape)


def grad_of(stored: StoredParameter, step: int) -> torch.Tensor:
    return draw(f"{stored.name} {step}", stored.shape)


def part_of(whole: torch.Tensor, stored: StoredParameter, grid: Grid, rank: int) -> torch.Tensor:
    """What `rank` stores, in memory of its own."""
    box = stored.box(grid, rank)
    if whole.ndim == 2:
        return whole[box.row_start : box.row_stop].clone()
    part = whole[box.expert_start : box.expert_stop, box.row_start : box.row_stop]
    return part.clone(memory_format=torch.contiguous_format)


def place(world: World, case: Case) -> DistMuon:
    """Distributed Muon over this rank's parts of `weight_of` each parameter."""
    grid = case.grid
    replica, rank = divmod(world.rank, grid.num_ranks)
    mesh = init_device_mesh("cpu", (grid.num_replicas, grid.num_ranks), mesh_dim_names=("replica", "rank"))
    return DistMuon(
        [nn.Parameter(part_of(weight_of(stored), stored, grid, rank)) for stored in case.parameters],
        config=case.config,
        layout=plan_layout(
            case.parameters, case.planned_grid, cost=partial(orthogonalize_flops, num_steps=case.config.num_steps)
        ),
        replica=0 if case.repeated else replica,
        rank=rank,
        shard_group=mesh.get_group("rank"),
        replica_group=mesh.get_group("replica"),
    )


def set_grads(muon: DistMuon, world: World, case: Case, step: int) -> None:
    """This rank's gradients: with owning replicas each replica has other elements of it, whose sum is exact."""
    replica, rank = divmod(world.rank, case.grid.num_ranks)
    for parameter, stored in zip(muon.params, case.parameters, strict=True):
        grad = grad_of(stored, step)
        if not case.repeated and case.grid.num_replicas > 1:
            whose = torch.arange(grad.numel()).view(grad.shape) % case.grid.num_replicas
            grad = torch.where(whose == replica, grad, 0.0)
        parameter.grad = part_of(grad, stored, case.grid, rank)


@dataclass(frozen=True)
class Outcome:
    """What one rank has after the steps."""

    weights: list[torch.Tensor]
    momenta: list[tuple[int, int, int, torch.Tensor]]
    """Parameter, first expert and row, and momentum [E, R, C] of each slab that this rank has."""
    grads_kept: bool
    """Whether `step` left every gradient as it was."""
    num_routed: int
    collectives: list[str]
    bytes_sent: int
    """Of the last step, the reduction over replicas included."""
    bytes_announced: int
    """As the exchanges say themselves."""


def take_steps(world: World, case: Case) -> Outcome:
    """Runs the case's steps on this rank."""
    muon = place(world, case)
    kept, counted = True, Collectives()
    for step in range(case.num_steps):
        set_grads(muon, world, case, step)
        counted = Collectives()
        with counted:
            muon.reduce_over_replicas()
            before = [None if p.grad is None else p.grad.clone() for p in muon.params]
            muon.step()
        kept &= all(p.grad is not None and torch.equal(p.grad, b) for p, b in zip(muon.params, before, strict=True))
    announced = muon.exchange.bytes_sent + (muon.replicas.bytes_sent() if muon.replicas else 0)
    return Outcome(
        weights=[p.data.clone() for p in muon.params],
        momenta=[
            (muon.slabs[i].parameter, muon.slabs[i].expert, muon.slabs[i].row, momentum)
            for i, momentum in muon.momenta.items()
        ],
        grads_kept=kept,
        num_routed=muon.exchange.num_routed,
        collectives=counted.names,
        bytes_sent=counted.bytes_sent,
        bytes_announced=announced,
    )


def whole_weights(case: Case, of_replica: Sequence[Outcome]) -> Named:
    """Puts together what the ranks of one replica hold."""
    weights = {stored.name: torch.full(stored.shape, torch.nan) for stored in case.parameters}
    for number, stored in enumerate(case.parameters):
        stack = weights[stored.name].view(-1, *stored.shape[-2:])
        for rank, outcome in enumerate(of_replica):
            box = stored.box(case.grid, rank)
            target = stack[box.expert_start : box.expert_stop, box.row_start : box.row_stop]
            target.copy_(outcome.weights[number].view(target.shape))
    return weights


def whole_momenta(case: Case, outcomes: Sequence[Outcome]) -> Named:
    """Puts together the slabs of all ranks; with owning replicas only all replicas have them all."""
    momenta = {stored.name: torch.full(stored.shape, torch.nan) for stored in case.parameters}
    for outcome in outcomes:
        for number, expert, row, slab in outcome.momenta:
            stored = case.parameters[number]
            stack = momenta[stored.name].view(-1, *stored.shape[-2:])
            target = stack[expert : expert + slab.shape[0], row : row + slab.shape[1]]
            if not case.repeated:
                assert target.isnan().all(), f"{stored.name}: two ranks keep the same momentum"
            target.copy_(slab)
    return momenta


def reference(case: Case) -> tuple[Named, Named]:
    """Weights and momenta of `optim/muon.py` on whole parameters, heads as stacks, in this process."""
    parameters = []
    for stored in case.parameters:
        heads = (-1, stored.head_rows, stored.columns) if stored.head_rows else stored.shape
        parameters.append(nn.Parameter(weight_of(stored).view(heads)))
    muon = Muon(parameters, config=case.config)
    for step in range(case.num_steps):
        for parameter, stored in zip(parameters, case.parameters, strict=True):
            parameter.grad = grad_of(stored, step).view(parameter.shape)
        muon.step()
    named = list(zip(case.parameters, parameters, strict=True))
    weights = {stored.name: parameter.data.view(stored.shape) for stored, parameter in named}
    momenta = {stored.name: muon.state[parameter]["momentum"].view(stored.shape) for stored, parameter in named}
    return weights, {name: momentum.float() for name, momentum in momenta.items()}
