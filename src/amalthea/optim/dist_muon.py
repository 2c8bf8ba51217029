"""Muon under every mesh: `optim/muon.py`'s update, each unit computed once.

Order of a step: momentum of routed slabs → their all-to-all starts → local units, batch by batch → routed units whole
→ back → (with owning replicas) updates spread → weights move. Weights move by the *bf16 update* that the owner
computed, on every rank that stores them, so replicas stay equal bit for bit whatever the weights' dtype.

Shape legend: E experts, R rows, C columns of a slab; M equal matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from amalthea.flexshard.layout import Layout
from amalthea.flexshard.runtime import ReplicaExchange, Slab, UnitExchange, slabs_of
from amalthea.optim.config import MuonConfig
from amalthea.optim.muon import update_scale
from amalthea.optim.newton_schulz import orthogonalize

_BATCH = 8
"""Equal matrices orthogonalized together; 4 to 8 fill an H100-class GPU, more gain nothing."""


class DistMuon(torch.optim.Optimizer):
    """Muon over local parts of parameters, executing a `Layout`.

    `params` are this rank's parts in the layout's order of parameters; a gradient that is missing counts as zero.
    `layout` spans the replicas where each unit has one owning replica, and a single replica (`replica` 0) where every
    replica repeats the work. State: one momentum per slab of this rank's replica (`momenta`), made at once.
    Communication: see `UnitExchange` and `ReplicaExchange`; none for local units of a single replica.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        *,
        config: MuonConfig,
        layout: Layout,
        replica: int,
        rank: int,
        shard_group: dist.ProcessGroup | None,
        replica_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(params, {"lr": config.lr})
        self.config, self.layout, self.params = config, layout, list(params)
        self.slabs = slabs_of(layout, rank=rank)
        self.mine = [i for i, slab in enumerate(self.slabs) if slab.owner.replica == replica]
        self.exchange = UnitExchange(layout, self.slabs, replica=replica, rank=rank, group=shard_group)
        self.replicas: ReplicaExchange | None = None
        if layout.grid.num_replicas > 1:
            assert replica_group is not None
            self.replicas = ReplicaExchange(
                self.slabs,
                [parameter.columns for parameter in layout.parameters],
                replica=replica,
                num_replicas=layout.grid.num_replicas,
                group=replica_group,
            )
        dtype = torch.float32 if config.momentum_dtype == "fp32" else torch.bfloat16
        self.momenta = {
            i: torch.zeros(self._view(i).shape, dtype=dtype, device=self._view(i).device) for i in self.mine
        }

    def _view(self, position: int) -> torch.Tensor:
        slab = self.slabs[position]
        return slab.view(self.params[slab.parameter].data)

    def grad_views(self, positions: Sequence[int]) -> list[torch.Tensor]:
        """Gradients of slabs [E, R, C], sharing memory with `.grad`."""
        return [slab.view(self._grad(slab)) for slab in (self.slabs[i] for i in positions)]

    def _grad(self, slab: Slab) -> torch.Tensor:
        parameter = self.params[slab.parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    @torch.no_grad()
    def reduce_over_replicas(self) -> None:
        """With owning replicas: sums each slab's gradient into its owner's `.grad`; elsewhere it is spent."""
        if self.replicas is not None:
            self.replicas.reduce(self.grad_views(range(len(self.slabs))))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        device = self.params[0].device
        routed = self.exchange.send_order
        updates: dict[int, torch.Tensor] = {}

        pending = None
        if self.exchange.num_routed:
            pending = self.exchange.launch_to_owners(self._directions(routed), device=device)
        for batch in self._local_batches():
            self._take(updates, dict(zip(batch, self._orthogonalize(self._directions(batch)), strict=True)))
        if pending is not None:
            whole = self.exchange.finish_to_owners(pending)
            pending = self.exchange.launch_back(self._orthogonalize_units(whole), device=device)
            shapes = [self._view(i).shape for i in routed]
            self._take(updates, dict(zip(routed, self.exchange.finish_back(pending, shapes), strict=True)))
        if self.replicas is not None:
            for position, update in self.replicas.spread(updates, device=device):
                self._apply(position, update)

    def _directions(self, positions: Sequence[int]) -> list[torch.Tensor]:
        """Moves the momenta of slabs and returns what is to be orthogonalized, in bf16; gradients stay as they are."""
        if not positions:
            return []
        mix = self.config.momentum
        grads = [grad.float() for grad in self.grad_views(positions)]
        stored = [self.momenta[i] for i in positions]
        momenta = [momentum.float() for momentum in stored]  # the stored ones themselves where they are fp32
        torch._foreach_lerp_(momenta, grads, 1 - mix)
        if self.config.momentum_dtype != "fp32":
            torch._foreach_copy_(stored, momenta)
        directions = torch._foreach_lerp(grads, momenta, mix) if self.config.nesterov else momenta
        return [direction.to(torch.bfloat16) for direction in directions]

    def _local_batches(self) -> list[list[int]]:
        """Local slabs of one shape, together about `_BATCH` matrices at a time."""
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for position in self.mine:
            if self.slabs[position].is_local:
                by_shape[self._view(position).shape[1:]].append(position)
        batches: list[list[int]] = []
        for positions in by_shape.values():
            size = 0
            for position in positions:
                if size == 0 or size >= _BATCH:
                    batches.append([])
                    size = 0
                batches[-1].append(position)
                size += self._view(position).shape[0]
        return batches

    def _orthogonalize(self, stacks: list[torch.Tensor]) -> list[torch.Tensor]:
        """Equal matrices in stacks [E, R, C] → their updates in the same stacks."""
        config = self.config
        joined = stacks[0] if len(stacks) == 1 else torch.cat(stacks)
        updates = orthogonalize(
            joined,
            num_steps=config.num_steps,
            coefficients=config.coefficients,
            form=config.form,
            max_elements=_BATCH * joined[0].numel(),
        )
        return list(updates.split([len(stack) for stack in stacks]))

    def _orthogonalize_units(self, units: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whole matrices of any shapes, equal ones together, in the order given."""
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for number, unit in enumerate(units):
            by_shape[unit.shape].append(number)
        results: dict[int, torch.Tensor] = {}
        for numbers in by_shape.values():
            for start in range(0, len(numbers), _BATCH):
                batch = numbers[start : start + _BATCH]
                updates = self._orthogonalize([units[number][None] for number in batch])
                results |= {number: update[0] for number, update in zip(batch, updates, strict=True)}
        return [results[number] for number in range(len(units))]

    def _take(self, updates: dict[int, torch.Tensor], new: dict[int, torch.Tensor]) -> None:
        """Keeps updates for the other replicas, or applies them where there are none."""
        if self.replicas is not None:
            updates.update(new)
            return
        for position, update in new.items():
            self._apply(position, update)

    def _apply(self, position: int, update: torch.Tensor) -> None:
        config, view = self.config, self._view(position)
        parameter = self.layout.parameters[self.slabs[position].parameter]
        rows = parameter.head_rows or parameter.rows
        lr = self.param_groups[0]["lr"]
        view.mul_(1 - lr * config.weight_decay)
        scale = update_scale(rows, parameter.columns, adjust_lr=config.adjust_lr)
        view.add_(update.view(view.shape), alpha=-lr * scale)
