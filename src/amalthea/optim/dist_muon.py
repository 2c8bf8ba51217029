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
from amalthea.flexshard.runtime import ReplicaExchange, Slab, UnitExchange, pack, slabs_of
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
        # What follows from the layout alone is made once: a step has hundreds of slabs.
        self._views = [slab.view(self.params[slab.parameter].data) for slab in self.slabs]
        self._local_batches = self._batch_local()
        self._scales = [self._scale(slab) for slab in self.slabs]
        dtype = torch.float32 if config.momentum_dtype == "fp32" else torch.bfloat16
        self.momenta = {i: torch.zeros_like(self._views[i], dtype=dtype) for i in self.mine}

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
        for batch in self._local_batches:
            self._take(updates, dict(zip(batch, self._orthogonalize(self._directions(batch)), strict=True)))
        if pending is not None:
            whole = self.exchange.finish_to_owners(pending)
            pending = self.exchange.launch_back(self._orthogonalize_units(whole), device=device)
            shapes = [self._views[i].shape for i in routed]
            self._take(updates, dict(zip(routed, self.exchange.finish_back(pending, shapes), strict=True)))
        if self.replicas is not None:
            for bucket in self.replicas.spread(updates, device=device):
                self._apply(bucket)

    def _directions(self, positions: Sequence[int]) -> list[torch.Tensor]:
        """Moves the momenta of slabs and returns what is to be orthogonalized, in fp32; gradients stay as they are."""
        if not positions:
            return []
        mix = self.config.momentum
        grads = [grad.float() for grad in self.grad_views(positions)]
        stored = [self.momenta[i] for i in positions]
        momenta = [momentum.float() for momentum in stored]  # the stored ones themselves where they are fp32
        torch._foreach_lerp_(momenta, grads, 1 - mix)
        if self.config.momentum_dtype != "fp32":
            torch._foreach_copy_(stored, momenta)
        return list(torch._foreach_lerp(grads, momenta, mix)) if self.config.nesterov else momenta

    def _batch_local(self) -> list[list[int]]:
        """Local slabs of one shape, together about `_BATCH` matrices at a time."""
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for position in self.mine:
            if self.slabs[position].is_local:
                by_shape[self._views[position].shape[1:]].append(position)
        batches: list[list[int]] = []
        for positions in by_shape.values():
            size = 0
            for position in positions:
                if size == 0 or size >= _BATCH:
                    batches.append([])
                    size = 0
                batches[-1].append(position)
                size += self._views[position].shape[0]
        return batches

    def _orthogonalize(self, stacks: list[torch.Tensor]) -> list[torch.Tensor]:
        """Equal matrices in stacks [E, R, C] → their updates in the same stacks."""
        config = self.config
        joined = pack(stacks, device=stacks[0].device).view(-1, *stacks[0].shape[1:])
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
        self._apply(new)

    def _apply(self, updates: dict[int, torch.Tensor]) -> None:
        """Decays the weights of slabs and moves them by their updates."""
        lr = self.param_groups[0]["lr"]
        if updates:
            torch._foreach_mul_([self._views[i] for i in updates], 1 - lr * self.config.weight_decay)
        by_scale: dict[float, list[int]] = defaultdict(list)
        for position in updates:
            by_scale[self._scales[position]].append(position)
        for scale, positions in by_scale.items():
            views = [self._views[i] for i in positions]
            shaped = [updates[i].view(view.shape) for i, view in zip(positions, views, strict=True)]
            torch._foreach_add_(views, shaped, alpha=-lr * scale)

    def _scale(self, slab: Slab) -> float:
        """Factor on the learning rate, from the shape of the slab's whole units."""
        parameter = self.layout.parameters[slab.parameter]
        rows = parameter.head_rows or parameter.rows
        return update_scale(rows, parameter.columns, adjust_lr=self.config.adjust_lr)
