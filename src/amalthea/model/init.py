"""Initial weights that do not depend on the mesh.

A *row* of a parameter is one index of its first dimension: an expert of a stack, a row of a matrix, an entry of a
vector. Rows are drawn in *bands* of fixed height, each from a generator seeded by (base seed, parameter name, band),
so that a rank can draw just the bands it holds, and the values are the same bits however the rows are spread.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn

from amalthea.model.config import ModelConfig
from amalthea.model.transformer import Transformer

_BAND_ELEMENTS = 1 << 20
"""A band has as many whole rows as fit here, at least one: the wasted draws of a rank stay below two bands."""

RowRange = Callable[[str, nn.Parameter], tuple[torch.Tensor, int, int]]
"""Maps a parameter to (local tensor, first global row, global rows)."""


def whole_rows(name: str, parameter: nn.Parameter) -> tuple[torch.Tensor, int, int]:
    """The `RowRange` of a model that is not sharded."""
    return parameter.data, 0, parameter.shape[0]


@torch.no_grad()
def initialize(model: Transformer, *, seed: int, rows_of: RowRange = whole_rows) -> None:
    """Fills every parameter and buffer in place.

    Norms are ones; matrices are normal with the deviation of `init_std`. Same bits on any mesh of one device type.
    Communication: none. Memory: one band at a time.
    """
    for name, parameter in model.named_parameters():
        local, first_row, _ = rows_of(name, parameter)
        std = parameter_std(name, model.config)
        if std is None:
            local.fill_(1.0)
        elif local.numel():
            _fill_normal(local, first_row, seed=parameter_seed(seed, name), std=std)
    for name, buffer in model.named_buffers():
        if name.endswith("router.bias"):
            buffer.zero_()
    model.rope.reset()


def parameter_std(name: str, config: ModelConfig) -> float | None:
    """Standard deviation of a parameter's first values; none for norms, which start at one.

    Matrices that write into the residual stream are smaller by √(2 · layers), so that its variance does not grow
    with depth (GPT-2). The embedding has deviation 1 where it is its own parameter: the first norm divides by it.
    """
    if "norm" in name:
        return None
    if name == "embed.weight":
        return config.init_std if config.tie_embeddings else 1.0
    if name.endswith(("attn.wo.weight", "w_down", "w_down.weight")):
        return config.init_std / math.sqrt(2 * config.num_layers)
    return config.init_std


def parameter_seed(seed: int, name: str) -> int:
    """A 63-bit seed that depends on the base seed and the parameter's name alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _fill_normal(local: torch.Tensor, first_row: int, *, seed: int, std: float) -> None:
    row_elements = local[0].numel()
    band_rows = max(1, _BAND_ELEMENTS // row_elements)
    end_row = first_row + local.shape[0]
    for band in range(first_row // band_rows, -(-end_row // band_rows)):
        band_start = band * band_rows
        start, stop = max(first_row, band_start), min(end_row, band_start + band_rows)
        generator = torch.Generator(local.device).manual_seed((seed + band) & ((1 << 63) - 1))
        values = torch.empty((band_rows, *local.shape[1:]), dtype=torch.float32, device=local.device)
        values.normal_(0.0, std, generator=generator)
        local[start - first_row : stop - first_row].copy_(values[start - band_start : stop - band_start])
