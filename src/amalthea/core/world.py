"""Which process this is among how many. Read from the environment by the launch layer only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class World:
    """One process of the run.

    `rank` of `size`; `local_rank` counts within the node, of `local_size`; `device` is where its tensors live.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Rank 0 alone writes logs, plots and manifests."""
        return self.rank == 0

    @property
    def torch_device(self) -> str:
        return "cpu" if self.device == "cpu" else f"cuda:{self.local_rank}"
