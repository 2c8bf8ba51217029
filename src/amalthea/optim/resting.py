"""Optimizers whose state rests elsewhere, such as in host memory, and comes to the device when its turn is.

Where it rests and how it travels is not known here: `Rest` is given from above.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from amalthea.flexshard.buckets import buckets
from amalthea.optim.dist_muon import DistMuon

BUCKET_ELEMENTS = 1 << 26
"""Of parameters that AdamW updates together: their moments are on the device at one time, and the next ones'."""


class Resting(Protocol):
    """Tensors that rest, and travel, together."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """As they rest."""
        ...


class Rest(Protocol):
    """A place where state rests between uses."""

    def zeros(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> Resting: ...

    def at_hand(self, resting: Any) -> AbstractContextManager[tuple[torch.Tensor, ...]]:
        """The same tensors on the device; what they hold at the end goes back to rest."""
        ...

    def settle(self) -> None:
        """Returns once everything is at rest, so that the host may read it."""
        ...


class RestingMuon(DistMuon):
    """`DistMuon` whose momenta come for the batch that moves them. Memory on the device: the momenta of two batches."""

    def __init__(self, *args: Any, rest: Rest, **options: Any) -> None:
        self.rest = rest
        self._resting: dict[tuple[int, ...], Resting] = {}
        super().__init__(*args, **options)

    def _new_momenta(self, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for batch in filter(None, [*self._local_batches, self.exchange.send_order]):
            resting = self.rest.zeros([self._views[position].shape for position in batch], dtype)
            self._resting[tuple(batch)] = resting
            found.update(zip(batch, resting.tensors, strict=True))
        assert sorted(found) == sorted(self.mine)
        return found

    def _directions(self, positions: Sequence[int], *, name: str) -> torch.Tensor:
        resting = self._resting[tuple(positions)]
        with self.rest.at_hand(resting) as here:
            self.momenta.update(zip(positions, here, strict=True))
            packed = super()._directions(positions, name=name)
            self.momenta.update(zip(positions, resting.tensors, strict=True))
        return packed


class RestingAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` whose moments come bucket by bucket. Memory on the device: the moments of two buckets."""

    def __init__(self, groups: list[dict[str, Any]], *, rest: Rest, **options: Any) -> None:
        super().__init__(groups, **options)
        self.rest = rest
        self._buckets: list[tuple[int, list[torch.Tensor], Resting]] = []
        for number, group in enumerate(self.param_groups):
            params = group["params"]
            # A rank whose parts are all empty has no bucket by size, and counts its steps all the same.
            for bucket in list(buckets([p.numel() for p in params], BUCKET_ELEMENTS)) or [range(len(params))]:
                members = [params[i] for i in bucket]
                shapes = [p.shape for p in members for _ in ("exp_avg", "exp_avg_sq")]
                resting = rest.zeros(shapes, members[0].dtype)
                self._buckets.append((number, members, resting))
                self._set_moments(members, resting.tensors)
                for parameter in members:
                    self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        for number, members, resting in self._buckets:
            with self.rest.at_hand(resting) as here:
                self._set_moments(members, here)
                self.param_groups = [groups[number] | {"params": members}]
                super().step()
                self._set_moments(members, resting.tensors)
        self.param_groups = groups

    def _set_moments(self, members: Sequence[torch.Tensor], moments: Sequence[torch.Tensor]) -> None:
        for parameter, first, second in zip(members, moments[::2], moments[1::2], strict=True):
            self.state[parameter] |= {"exp_avg": first, "exp_avg_sq": second}
