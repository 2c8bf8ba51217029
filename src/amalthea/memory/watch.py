"""Watches a run's memory: figures of each step, and an explanation where it runs out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from amalthea.memory.config import MemoryConfig
from amalthea.memory.monitor import PeakMemory, peak_memory
from amalthea.memory.oom import OutOfMemoryError, is_out_of_memory, take_snapshot
from amalthea.memory.tracker import StorageTracker
from amalthea.model.transformer import Transformer


class MemoryWatch:
    """Around a run from before it is built.

    With `memory.track` on a CPU it counts storages; a GPU's allocator counts by itself. Where memory runs out inside,
    it writes `oom_rankN.json` into `run_dir` and raises OutOfMemoryError, which says who held it; other errors pass.
    Communication: none, each rank reports for itself.
    """

    def __init__(self, config: MemoryConfig, *, run_dir: Path, rank: int, device: torch.device) -> None:
        self.config, self.run_dir, self.rank, self.device = config, run_dir, rank, device
        self.tracker = StorageTracker() if config.track and device.type == "cpu" else None
        self._named: Callable[[], Mapping[str, torch.Tensor]] = dict

    def follow(self, model: Transformer, named_state: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Names holders from here on: parameters, gradients, buffers and, from `named_state`, optimizer state."""
        if self.tracker is not None:
            self.tracker.name_modules(_named_modules(model))

        def named() -> dict[str, torch.Tensor]:
            found = {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
            found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
            return found | dict(named_state())

        self._named = named

    def read(self) -> PeakMemory:
        """The peak since the last reading."""
        return peak_memory(self.device, self.tracker)

    def __enter__(self) -> Self:
        if self.tracker is not None:
            self.tracker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.tracker is not None:
            self.tracker.__exit__(kind, error, trace)
        if error is not None and is_out_of_memory(error):
            self._explain(error)

    def _explain(self, error: BaseException) -> None:
        # Taken while the failed frames still hold their tensors.
        snapshot = take_snapshot(
            error, rank=self.rank, device=self.device, named=self._named(), config=self.config, tracker=self.tracker
        )
        path = self.run_dir / f"oom_rank{self.rank}.json"
        with suppress(OSError):  # the error that follows says what matters
            path.write_text(json.dumps(asdict(snapshot), indent=1) + "\n", encoding="utf-8")
        raise OutOfMemoryError(snapshot.describe(path)) from error


def _named_modules(model: Transformer) -> Iterator[tuple[str, nn.Module]]:
    """All modules; those in blocks are `blocks.LAYER.…` however blocks are grouped."""
    yield from model.named_modules()
    for layer, block in enumerate(model.blocks):
        for name, module in block.named_modules():
            yield f"blocks.{layer}.{name}".rstrip("."), module
