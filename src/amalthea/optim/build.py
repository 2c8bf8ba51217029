"""Who optimizes what, and one object that steps them all.

Optimizers work on the *local* part of each parameter, so that DTensor adds nothing to a step. State is saved by
parameter name, as DTensors of the parameter's placement (AdamW) or as the pieces that owners hold (Muon), in forms
that reshard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from amalthea.core.errors import PlacementError
from amalthea.core.pieces import Piece, Pieces
from amalthea.core.tensors import DTYPES, local_tensor
from amalthea.flexshard.buckets import buckets
from amalthea.flexshard.layout import Grid, StoredParameter
from amalthea.flexshard.plan import digest, plan_layout
from amalthea.optim.assign import Assignment as Assignment
from amalthea.optim.assign import OptimizerName, assign_all, stored_parameter
from amalthea.optim.config import OptimConfig
from amalthea.optim.dist_muon import DistMuon
from amalthea.optim.flops import orthogonalize_flops
from amalthea.optim.resting import BUCKET_ELEMENTS, GradientVisits, Rest, Resting, RestingAdamW, RestingMuon


@dataclass(frozen=True)
class Place:
    """This rank in the grid, and the groups of its axes; none where the axis has one rank.

    `all_ranks` is the whole run. `owning` says whether gradients arrive unreduced over replicas, so that each unit has
    one owning replica; otherwise replicas repeat the work.
    """

    grid: Grid = field(default_factory=lambda: Grid(1, 1))
    replica: int = 0
    rank: int = 0
    shard_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    all_ranks: dist.ProcessGroup | None = None
    owning: bool = False


class Optimizers:
    """All optimizers of a model, stepped together.

    A step is `reduce_over_replicas`, `grad_norm`, by choice `scale_grads`, then `step`. What `rest` keeps (state, or
    parameters with their gradients, or all) comes a batch at a time; `offsets_of` says where this rank's part of a
    parameter begins. Raises PlacementError where a parameter's storage is not one that the planner knows.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        *,
        place: Place | None = None,
        head_dim: int = 1,
        experts_by_rows: bool = False,
        rest: Rest | None = None,
        offsets_of: Callable[[str, nn.Parameter], tuple[int, ...]] | None = None,
    ) -> None:
        self.place = place or Place()
        self.rest, self._offsets_of = rest, offsets_of
        self.parameters = dict(named_parameters)
        self.assignments = assign_all(((name, tuple(p.shape)) for name, p in self.parameters.items()), config)
        self._locals = {name: nn.Parameter(local_tensor(p.data)) for name, p in self.parameters.items()}
        self.device = next(iter(self._locals.values())).device if rest is None else rest.device
        self._visits = GradientVisits(rest)
        self._visiting: dict[tuple[str, ...], Resting] = {}
        self._base_lr = {"muon": config.muon.lr, "adamw": config.adamw.lr}
        self.muon: DistMuon | RestingMuon | None = None
        self.adamw: torch.optim.AdamW | RestingAdamW | None = None
        self._adamw_state: dict[str, torch.Tensor] = {}
        if names := self._names("muon"):
            stored = [
                stored_parameter(
                    name,
                    tuple(self.parameters[name].shape),
                    config,
                    head_dim=head_dim,
                    experts_by_rows=experts_by_rows,
                )
                for name in names
            ]
            self.muon = self._build_muon(config, stored)
        if names := self._names("adamw"):
            self.adamw = _build_adamw(config, [self._locals[name] for name in names], rest)
            if isinstance(self.adamw, RestingAdamW):
                self._name_resting_state(self.adamw, names)
            else:
                self._make_adamw_state(self.adamw, names)

    def _names(self, optimizer: OptimizerName) -> list[str]:
        return [a.name for a in self.assignments if a.optimizer == optimizer]

    def _build_muon(self, config: OptimConfig, stored: list[StoredParameter]) -> DistMuon:
        place = self.place
        # Without owning replicas each replica plans, and works, as if it were alone.
        grid = place.grid if place.owning else Grid(1, place.grid.num_ranks, place.grid.ep)
        cost = partial(orthogonalize_flops, num_steps=config.muon.num_steps)
        kind = DistMuon if self.rest is None else partial(RestingMuon, rest=self.rest)
        return kind(
            [self._locals[parameter.name] for parameter in stored],
            config=config.muon,
            layout=plan_layout(stored, grid, cost=cost),
            replica=place.replica if place.owning else 0,
            rank=place.rank,
            shard_group=place.shard_group,
            replica_group=place.replica_group,
        )

    def check_same_plan(self) -> None:
        """Makes sure that all ranks made the same layout, since each runs its part of it without asking the others.

        Raises PlacementError, on every rank alike, naming the ranks that differ from most. Communication: an all-gather
        of one integer over all ranks, and a wait for it.
        """
        if self.muon is None or self.place.all_ranks is None:
            return
        mine = torch.tensor([digest(self.muon.layout)], device=self.device)
        gathered = mine.new_empty(dist.get_world_size(self.place.all_ranks))
        dist.all_gather_single(gathered, mine, group=self.place.all_ranks)
        digests: list[int] = gathered.tolist()
        (most, _), *others = Counter(digests).most_common()
        if others:
            differing = [str(rank) for rank, found in enumerate(digests) if found != most]
            raise PlacementError(
                f"the plans of who orthogonalizes which matrix differ: rank {', '.join(differing)} planned otherwise "
                f"than rank {digests.index(most)}; all ranks must run the same code with the same configuration"
            )

    def _make_adamw_state(self, adamw: torch.optim.AdamW, names: list[str]) -> None:
        """Makes the state at once, in the parameter's placement, and gives AdamW its local part."""
        for name in names:
            parameter = self.parameters[name]
            state = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.zeros((), dtype=torch.float32, device=self.device)
            adamw.state[self._locals[name]] = {key: local_tensor(value) for key, value in state.items()}
            self._adamw_state |= {f"{name}.{key}": value for key, value in state.items()}

    def _name_resting_state(self, adamw: RestingAdamW, names: list[str]) -> None:
        for name in names:
            for key, tensor in adamw.state[self._locals[name]].items():
                self._adamw_state[f"{name}.{key}"] = tensor if key == "step" else self._as_saved(name, tensor)

    def _as_saved(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A DTensor would have to lie where its mesh is; pieces may lie anywhere."""
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor):
            return tensor
        assert self._offsets_of is not None
        pieces = [Piece(self._offsets_of(name, parameter), tensor)] if tensor.numel() else []
        return Pieces(parameter.shape, tensor.dtype, pieces)

    def named_state(self) -> dict[str, torch.Tensor]:
        """Every state tensor by `PARAMETER.KEY`, sharing memory with the optimizers; what rests elsewhere is there."""
        if self.rest is not None:
            self.rest.settle()
        state: dict[str, torch.Tensor] = dict(self._adamw_state)
        if self.muon is not None:
            state |= {f"{name}.momentum": pieces for name, pieces in _momentum_pieces(self.muon).items()}
        return state

    @property
    def learning_rates(self) -> dict[str, float]:
        """The current learning rate by optimizer."""
        found = {"muon": self.muon, "adamw": self.adamw}
        return {name: o.param_groups[0]["lr"] for name, o in found.items() if o is not None}

    @torch.no_grad()
    def reduce_over_replicas(self) -> None:
        """Hands local gradients to the optimizers; with owning replicas, sums them over replicas first.

        Muon's go to their owners only. Communication over replicas: a reduce-scatter for each of Muon's buckets, an
        all-reduce for each of AdamW's.
        """
        for name, local in self._locals.items():
            grad = self.parameters[name].grad
            local.grad = None if grad is None else local_tensor(grad)
        if not self.place.owning:
            return
        if self.muon is not None:
            self.muon.reduce_over_replicas()
        for grads in self._each_adamw_grads("summed", changes=True):
            _all_reduce_together(grads, self.place.replica_group)

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Euclidean norm of all gradients, experts included: an fp32 scalar, equal on every rank.

        Within a replica each rank holds another part of every parameter, so one sum of squares over its ranks is the
        norm of a single process. With owning replicas the sum runs over all ranks: Muon's units count where they are
        owned, and AdamW's, which all replicas hold, by their share. Communication: one all-reduce of a scalar.
        """
        square = torch.zeros((), dtype=torch.float32, device=self.device)
        if adamw := _norms(self._each_adamw_grads("measured")):
            square += _square_sum(adamw) / (self.place.grid.num_replicas if self.place.owning else 1)
        if muon := _norms(self._each_muon_grads("measured by Muon")):
            square += _square_sum(muon)
        group = self.place.all_ranks if self.place.owning else self.place.shard_group
        if group is not None:
            dist.all_reduce(square, group=group)
        return square.sqrt()

    @torch.no_grad()
    def scale_grads(self, *, norm: torch.Tensor, max_norm: float) -> None:
        """Multiplies every gradient by min(1, max_norm / norm), at once or, with `rest`, when it comes to be used."""
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.rest is None:
            torch._foreach_mul_(self._adamw_grads(self._names("adamw")) + self._muon_grads(), factor)
        self._set_grad_factor(factor)

    def _set_grad_factor(self, factor: torch.Tensor | None) -> None:
        for optimizer in (self.muon, self.adamw):
            if isinstance(optimizer, RestingMuon | RestingAdamW):
                optimizer.grad_factor = factor

    @torch.no_grad()
    def step(self, *, lr_factor: float) -> None:
        """Updates all parameters from their gradients at `lr_factor` times the configured rates."""
        for name, optimizer in (("muon", self.muon), ("adamw", self.adamw)):
            if optimizer is None:
                continue
            for group in optimizer.param_groups:
                group["lr"] = self._base_lr[name] * lr_factor
            optimizer.step()
        if self.rest is not None:
            self.rest.land()

    def each_weight(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's parts of parameters by name, on the device, to be changed in place there; once a step.

        Communication: none.
        """
        if self.rest is None:
            yield from ((name, self._locals[name].data) for name in names)
            return
        for part in buckets([self._locals[name].numel() for name in names], BUCKET_ELEMENTS):
            some = tuple(names[part.start : part.stop])
            if some not in self._visiting:
                self._visiting[some] = self.rest.parameters(lambda some=some: [self._locals[n].data for n in some])
            with self.rest.at_hand(self._visiting[some]) as (found,):
                yield from zip(some, found, strict=True)
        self.rest.land()

    def zero_grad(self) -> None:
        self._set_grad_factor(None)
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self._locals[name].grad = None

    def _each_adamw_grads(self, use: str, *, changes: bool = False) -> Iterator[Sequence[torch.Tensor]]:
        names = self._names("adamw")
        sizes = (self._locals[name].numel() for name in names)
        return self._visits.each(use, names, sizes, self._adamw_grads, changes=changes)

    def _adamw_grads(self, names: Sequence[str]) -> list[torch.Tensor]:
        return [grad for name in names if (grad := self._locals[name].grad) is not None]

    def _each_muon_grads(self, use: str) -> Iterator[Sequence[torch.Tensor]]:
        """Gradients of the units that this rank's replica owns; whole local ones where it owns all."""
        muon = self.muon
        if muon is None:
            return iter(())
        if self.place.owning:
            return self._visits.each(use, muon.mine, muon.sizes_of(muon.mine), muon.grad_views)
        sizes = (parameter.numel() for parameter in muon.params)
        return self._visits.each(use, muon.params, sizes, _given_grads)

    def _muon_grads(self) -> list[torch.Tensor]:
        """The same, where none of them rest."""
        return [grad for grads in self._each_muon_grads("scaled") for grad in grads]


def _build_adamw(config: OptimConfig, parameters: list[nn.Parameter], rest: Rest | None) -> torch.optim.AdamW:
    """Weight decay falls on matrices only: norms are scales, not directions."""
    adamw = config.adamw
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": adamw.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = torch.optim.AdamW if rest is None else partial(RestingAdamW, rest=rest)
    return kind(
        [group for group in groups if group["params"]],
        lr=adamw.lr,
        betas=(adamw.beta1, adamw.beta2),
        eps=adamw.eps,
        fused=True,
    )


def _momentum_pieces(muon: DistMuon) -> dict[str, Pieces]:
    pieces: dict[str, list[Piece]] = {parameter.name: [] for parameter in muon.layout.parameters}
    for position, momentum in muon.momenta.items():
        slab = muon.slabs[position]
        parameter = muon.layout.parameters[slab.parameter]
        if len(parameter.shape) == 3:
            pieces[parameter.name].append(Piece((slab.expert, slab.row, 0), momentum))
        else:
            pieces[parameter.name].append(Piece((slab.row, 0), momentum[0]))
    dtype = DTYPES[muon.config.momentum_dtype]
    return {
        parameter.name: Pieces(parameter.shape, dtype, pieces[parameter.name]) for parameter in muon.layout.parameters
    }


def _given_grads(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _norms(visits: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [norm for grads in visits if grads for norm in torch._foreach_norm(list(grads), 2, dtype=torch.float32)]


def _square_sum(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(norms).square().sum()


def _all_reduce_together(grads: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    if not grads:
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    parts = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(list(grads), [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])
