"""Muon under every mesh: `optim/muon.py`'s update, each unit computed once.

Order of a step: momentum of routed slabs → their all-to-all starts → half of the local units, batch by batch → routed
units whole → back → the other half → (with owning replicas) updates spread → weights move. Weights move by the *bf16
update* that the owner computed, on every rank that stores them, so replicas stay equal bit for bit whatever the
weights' dtype.

Shape legend: E experts, R rows, C columns of a slab; M equal matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from amalthea.core.scratch import Scratch
from amalthea.core.tensors import DTYPES
from amalthea.flexshard.buckets import buckets
from amalthea.flexshard.layout import Layout
from amalthea.flexshard.runtime import ReplicaExchange, Slab, UnitExchange, slabs_of
from amalthea.optim.config import MuonConfig
from amalthea.optim.muon import update_scale
from amalthea.optim.newton_schulz import elements_at_work, orthogonalize

_BATCH_ELEMENTS_ELSEWHERE = 1 << 26
"""Of equal matrices orthogonalized together on a GPU: 4 to 8 of a large model's fill it, and more gain nothing."""
_BATCH_ELEMENTS_ON_CPU = 3 << 20
"""The same on a CPU, counting `elements_at_work`: more together save calls, and fewer stay in its cache."""

_BLOCK_ELEMENTS = 1 << 17
"""Of a CPU's element-wise passes: the second pass over a block finds it in the cache."""


class DistMuon(torch.optim.Optimizer):
    """Muon over local parts of parameters, executing a `Layout`.

    `params` are this rank's parts in the layout's order of parameters; a gradient that is missing counts as zero.
    `layout` spans the replicas where each unit has one owning replica, and a single replica (`replica` 0) where every
    replica repeats the work. `device` is where is computed, by default where `params` lie. State: one momentum per slab
    of this rank's replica (`momenta`), made at once.
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
        device: torch.device | None = None,
    ) -> None:
        super().__init__(params, {"lr": config.lr})
        self.config, self.layout, self.params = config, layout, list(params)
        self.device = self.params[0].device if device is None else device
        self.slabs = slabs_of(layout, rank=rank)
        self.mine = [i for i, slab in enumerate(self.slabs) if slab.owner.replica == replica]
        self._scratch = Scratch(self.device)
        self.exchange = UnitExchange(
            layout, self.slabs, replica=replica, rank=rank, group=shard_group, scratch=self._scratch
        )
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
        self.momenta = self._new_momenta(DTYPES[config.momentum_dtype])

    def _new_momenta(self, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """By slab of `mine`."""
        return {i: torch.zeros_like(self._views[i], dtype=dtype) for i in self.mine}

    def grad_views(self, positions: Sequence[int]) -> list[torch.Tensor]:
        """Gradients of slabs [E, R, C], sharing memory with `.grad`."""
        return [slab.view(self._grad(slab)) for slab in (self.slabs[i] for i in positions)]

    def sizes_of(self, positions: Sequence[int]) -> list[int]:
        """Elements of slabs."""
        return [self._views[i].numel() for i in positions]

    def _grad(self, slab: Slab) -> torch.Tensor:
        parameter = self.params[slab.parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    @torch.no_grad()
    def reduce_over_replicas(self) -> None:
        """With owning replicas: sums each slab's gradient into its owner's `.grad`; elsewhere it is spent."""
        if self.replicas is not None:
            self.replicas.reduce(self._summing)

    def _summing(self, positions: Sequence[int]) -> AbstractContextManager[list[torch.Tensor]]:
        """Gradients of slabs, to be replaced in place where `mine`."""
        return nullcontext(self.grad_views(positions))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        routed = self.exchange.send_order
        updates: dict[int, torch.Tensor] = {}
        half = len(self._local_batches) // 2
        if not self.exchange.num_routed:
            self._step_local(self._local_batches, updates)
        else:
            pending = self.exchange.launch_to_owners(self._directions(routed, name="sent"))
            self._step_local(self._local_batches[:half], updates)
            whole = self.exchange.finish_to_owners(pending)
            for stack in whole:
                self._orthogonalize(stack)
            pending = self.exchange.launch_back(whole)
            self._step_local(self._local_batches[half:], updates)
            self._take(updates, routed, self.exchange.finish_back(pending))
        if self.replicas is not None:
            for bucket in self.replicas.spread(updates, device=self.device):
                self._apply(bucket)

    def _step_local(self, batches: Sequence[Sequence[int]], updates: dict[int, torch.Tensor]) -> None:
        for batch in batches:
            # Updates for other replicas are kept until all are there, else a batch is done with before the next.
            name = f"batch {batch[0]}" if self.replicas is not None else "batch"
            matrices = self._directions(batch, name=name).view(-1, *self._views[batch[0]].shape[1:])
            self._orthogonalize(matrices)
            self._take(updates, batch, matrices)

    def _directions(self, positions: Sequence[int], *, name: str) -> torch.Tensor:
        """Moves the momenta of slabs and returns what is to be orthogonalized, slab after slab, flat and in bf16.

        Gradients stay as they are. The result is the scratch buffer `name`.
        """
        sizes = self.sizes_of(positions)
        packed = self._scratch.take(name, sum(sizes))
        self._move_momenta(positions, packed.split(sizes))
        return packed

    def _move_momenta(self, positions: Sequence[int], directions: Sequence[torch.Tensor]) -> None:
        self._mix(self.grad_views(positions), [self.momenta[i] for i in positions], directions)

    def _mix(
        self, gradients: Sequence[torch.Tensor], momenta: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]
    ) -> None:
        """Moves momenta by gradients of the same shapes, and writes flat `directions`."""
        mix, nesterov = self.config.momentum, self.config.nesterov
        flat_gradients, flat_momenta = [g.reshape(-1) for g in gradients], [m.view(-1) for m in momenta]
        for grads, stored, packed in _in_cache(flat_gradients, flat_momenta, directions):
            grads, moved = [g.float() for g in grads], [m.float() for m in stored]  # themselves where they are fp32
            torch._foreach_lerp_(moved, grads, 1 - mix)
            if self.config.momentum_dtype != "fp32":
                torch._foreach_copy_(stored, moved)
            torch._foreach_copy_(packed, torch._foreach_lerp(grads, moved, mix) if nesterov else moved)

    def _batch_local(self) -> list[list[int]]:
        """Local slabs of one shape, together about `_batch_elements` at a time."""
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for position in self.mine:
            if self.slabs[position].is_local:
                by_shape[self._views[position].shape[1:]].append(position)
        return [
            [positions[i] for i in bucket]
            for shape, positions in by_shape.items()
            for bucket in buckets([self._views[i].numel() for i in positions], self._batch_elements(*shape))
        ]

    def _batch_elements(self, rows: int, columns: int) -> int:
        if self.device.type != "cpu":
            return _BATCH_ELEMENTS_ELSEWHERE
        return max(1, _BATCH_ELEMENTS_ON_CPU // elements_at_work(rows, columns)) * rows * columns

    def _orthogonalize(self, matrices: torch.Tensor) -> None:
        """In place."""
        orthogonalize(
            matrices,
            num_steps=self.config.num_steps,
            coefficients=self.config.coefficients,
            form=self.config.form,
            products=self.config.products,
            max_elements=self._batch_elements(*matrices.shape[1:]),
            out=matrices,
            scratch=self._scratch,
        )

    def _take(self, updates: dict[int, torch.Tensor], positions: Sequence[int], new: torch.Tensor) -> None:
        """Keeps the updates of slabs, given one after the other, for the other replicas; without any, applies them."""
        sizes = self.sizes_of(positions)
        found = dict(zip(positions, new.view(-1).split(sizes), strict=True))
        if self.replicas is not None:
            updates.update(found)
        else:
            self._apply(found)

    def _apply(self, updates: dict[int, torch.Tensor]) -> None:
        """Decays the weights of slabs and moves them by their updates, which are flat."""
        by_scale: dict[float, list[int]] = defaultdict(list)
        for position in updates:
            by_scale[self._scales[position]].append(position)
        for scale, positions in by_scale.items():
            self._move_weights(positions, [updates[i] for i in positions], scale=scale)

    def _move_weights(self, positions: Sequence[int], updates: Sequence[torch.Tensor], *, scale: float) -> None:
        self._add([self._views[i] for i in positions], updates, scale=scale)

    def _add(self, slabs: Sequence[torch.Tensor], updates: Sequence[torch.Tensor], *, scale: float) -> None:
        lr = self.param_groups[0]["lr"]
        for weights, moves in _in_cache([slab.view(-1) for slab in slabs], updates):
            torch._foreach_mul_(weights, 1 - lr * self.config.weight_decay)
            torch._foreach_add_(weights, moves, alpha=-lr * scale)

    def _scale(self, slab: Slab) -> float:
        """Factor on the learning rate, from the shape of the slab's whole units."""
        parameter = self.layout.parameters[slab.parameter]
        rows = parameter.head_rows or parameter.rows
        return update_scale(rows, parameter.columns, adjust_lr=self.config.adjust_lr)


def _in_cache(*lists: Sequence[torch.Tensor]) -> Iterator[list[list[torch.Tensor]]]:
    """Cuts lists of flat tensors alike: on a CPU into a block of each at a time, elsewhere not at all."""
    if not lists[0]:
        return
    if lists[0][0].device.type != "cpu":
        yield [list(tensors) for tensors in lists]
        return
    for tensors in zip(*lists, strict=True):
        for blocks in zip(*(tensor.split(_BLOCK_ELEMENTS) for tensor in tensors), strict=True):
            yield [[block] for block in blocks]
