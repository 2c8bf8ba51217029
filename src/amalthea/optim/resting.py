"""Optimizers whose state, parameters or gradients rest elsewhere, such as in host memory.

They come to the device when their turn is. Where they rest and how they travel is not known here: `Rest` is given from
above. What does not rest is used where it lies, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.optim.adamw import adamw

from amalthea.flexshard.buckets import buckets
from amalthea.optim.dist_muon import DistMuon

BUCKET_ELEMENTS = 1 << 26
"""Of what is on the device at one time: parameters with all that is theirs; and as much again that is on its way."""


class Resting(Protocol):
    """Tensors that rest, and travel, together."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """As they rest."""
        ...


class Rest(Protocol):
    """A place where tensors rest between uses."""

    @property
    def device(self) -> torch.device:
        """Where they come to."""
        ...

    def zeros(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> Resting: ...

    def parameters(self, find: Callable[[], Sequence[torch.Tensor]]) -> Resting: ...

    def gradients(self, find: Callable[[], Sequence[torch.Tensor]], *, changes: bool = False) -> Resting:
        """With `changes`, what becomes of them goes back to rest."""
        ...

    def at_hand(self, *groups: Any) -> AbstractContextManager[tuple[tuple[torch.Tensor, ...], ...]]:
        """The same tensors on the device; what they hold at the end goes back to rest. Once a step for each group."""
        ...

    def land(self) -> None:
        """Whatever is computed from here on finds at rest what was changed."""
        ...

    def settle(self) -> None:
        """Returns once everything is at rest, so that the host may read it."""
        ...


class RestingMuon(DistMuon):
    """`DistMuon` that has momenta, gradients and weights come for the batch that moves them.

    `grad_factor`, where set, is what gradients are multiplied by when they come. Memory on the device: two batches.
    """

    def __init__(self, *args: Any, rest: Rest, **options: Any) -> None:
        self.rest = rest
        self.grad_factor: torch.Tensor | None = None
        self._bucket_elements = BUCKET_ELEMENTS
        self._resting: dict[tuple[str, tuple[int, ...]], Resting] = {}
        super().__init__(*args, device=rest.device, **options)

    def _new_momenta(self, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for batch in [*self._local_batches, self.exchange.send_order]:
            for part in self._parts(batch):
                resting = self.rest.zeros([self._views[position].shape for position in part], dtype)
                self._resting["momenta", tuple(part)] = resting
                found.update(zip(part, resting.tensors, strict=True))
        assert sorted(found) == sorted(self.mine)
        return found

    @contextmanager
    def _summing(self, positions: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        # What others own is only read, so only what is summed here goes back.
        mine = set(self.mine)
        theirs, ours = [i for i in positions if i not in mine], [i for i in positions if i in mine]
        groups = self._gradients("sent", theirs), self._gradients("summed", ours, changes=True)
        with self.rest.at_hand(*groups) as (sent, summed):
            found = dict(zip([*theirs, *ours], [*sent, *summed], strict=True))
            yield [found[i] for i in positions]

    def _move_momenta(self, positions: Sequence[int], directions: Sequence[torch.Tensor]) -> None:
        coming = iter(directions)
        for part in self._parts(positions):
            groups = self._gradients("used", part), self._resting["momenta", tuple(part)]
            with self.rest.at_hand(*groups) as (gradients, momenta):
                if self.grad_factor is not None:
                    torch._foreach_mul_(gradients, self.grad_factor)
                self._mix(gradients, momenta, [next(coming) for _ in part])

    def _move_weights(self, positions: Sequence[int], updates: Sequence[torch.Tensor], *, scale: float) -> None:
        coming = iter(updates)
        for part in self._parts(positions):
            with self.rest.at_hand(self._weights(part)) as (slabs,):
                self._add(slabs, [next(coming) for _ in part], scale=scale)

    def _parts(self, positions: Sequence[int]) -> Iterator[list[int]]:
        return ([positions[i] for i in part] for part in buckets(self.sizes_of(positions), self._bucket_elements))

    def _gradients(self, use: str, positions: list[int], *, changes: bool = False) -> Resting:
        key = use, tuple(positions)
        if key not in self._resting:
            self._resting[key] = self.rest.gradients(lambda: self.grad_views(positions), changes=changes)
        return self._resting[key]

    def _weights(self, positions: list[int]) -> Resting:
        key = "weights", tuple(positions)
        if key not in self._resting:
            self._resting[key] = self.rest.parameters(lambda: [self._views[i] for i in positions])
        return self._resting[key]


class _Bucket:
    """Parameters of one group that AdamW updates together."""

    def __init__(self, group: dict[str, Any], members: list[torch.Tensor], rest: Rest) -> None:
        self.group, self.members = group, members
        self.weights = rest.parameters(lambda: [p.data for p in members])
        self.gradients = rest.gradients(lambda: [p.grad for p in members if p.grad is not None])
        self.moments = rest.zeros([p.shape for p in members for _ in ("exp_avg", "exp_avg_sq")], members[0].dtype)
        self.steps = [torch.zeros((), dtype=torch.float32, device=rest.device) for _ in members]


class RestingAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, fused, that has moments, gradients and weights come bucket by bucket.

    `grad_factor`, where set, is what gradients are multiplied by when they come. Memory on the device: two buckets.
    """

    def __init__(self, groups: list[dict[str, Any]], *, rest: Rest, **options: Any) -> None:
        super().__init__(groups, **options)
        self.rest = rest
        self.grad_factor: torch.Tensor | None = None
        self._buckets: list[_Bucket] = []
        for group in self.param_groups:
            params: list[torch.Tensor] = group["params"]
            # A rank whose parts are all empty has no bucket by size, and counts its steps all the same.
            for part in list(buckets([p.numel() for p in params], BUCKET_ELEMENTS)) or [range(len(params))]:
                bucket = _Bucket(group, [params[i] for i in part], rest)
                self._buckets.append(bucket)
                firsts, seconds = _halves(bucket.moments.tensors)
                for i, member in enumerate(bucket.members):
                    self.state[member] |= {"step": bucket.steps[i], "exp_avg": firsts[i], "exp_avg_sq": seconds[i]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for bucket in self._buckets:
            with self.rest.at_hand(bucket.weights, bucket.gradients, bucket.moments) as here:
                self._update(bucket, *here)

    def _update(
        self,
        bucket: _Bucket,
        weights: tuple[torch.Tensor, ...],
        gradients: tuple[torch.Tensor, ...],
        moments: tuple[torch.Tensor, ...],
    ) -> None:
        """As `torch.optim.AdamW` does: members without a gradient stay as they are."""
        if self.grad_factor is not None and gradients:
            torch._foreach_mul_(gradients, self.grad_factor)
        moved = [i for i, member in enumerate(bucket.members) if member.grad is not None]
        firsts, seconds = _halves(moments)
        group = bucket.group
        adamw(
            [weights[i] for i in moved],
            list(gradients),
            [firsts[i] for i in moved],
            [seconds[i] for i in moved],
            [],
            [bucket.steps[i] for i in moved],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class GradientVisits:
    """Gradients on the device, a bucket at a time; without a `Rest` where they lie."""

    def __init__(self, rest: Rest | None) -> None:
        self._rest = rest
        self._resting: dict[tuple[str, int], Resting] = {}

    def each(
        self,
        use: str,
        keys: Sequence[Any],
        sizes: Iterable[int],
        find: Callable[[Sequence[Any]], Sequence[torch.Tensor]],
        *,
        changes: bool = False,
    ) -> Iterator[Sequence[torch.Tensor]]:
        """Those that `find` gives for some of `keys`, one bucket after the other.

        `sizes` are their elements, `use` a name for what is done with them, once a step. With `changes` they may be
        changed in place.
        """
        for number, part in enumerate(list(buckets(list(sizes), BUCKET_ELEMENTS)) or [range(len(keys))]):
            some = keys[part.start : part.stop]
            if self._rest is None:
                yield find(some)
                continue
            if (use, number) not in self._resting:
                self._resting[use, number] = self._rest.gradients(lambda some=some: find(some), changes=changes)
            with self._rest.at_hand(self._resting[use, number]) as (found,):
                yield found


def _halves(moments: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """First and second moments, which lie in turn."""
    return moments[::2], moments[1::2]
