"""Initial weights that do not depend on the mesh.

A *row* of a parameter is one index of its first dimension: an expert of a stack, a row of a matrix, an entry of a
vector. Rows are drawn in *bands* of fixed height, each from a generator seeded by (base seed, parameter name, band),
so that a rank can draw just the bands it holds, and the values are the same bits however the parameter is spread.
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

PartOf = Callable[[str, nn.Parameter], tuple[torch.Tensor, tuple[int, ...]]]
"""Maps a parameter to this rank's part of it and the global index where that begins, by dimension."""


def whole(name: str, parameter: nn.Parameter) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The `PartOf` a model that is not sharded."""
    return parameter.data, (0,) * parameter.ndim


@torch.no_grad()
def initialize(model: Transformer, *, seed: int, part_of: PartOf = whole, draw_on: torch.device | None = None) -> None:
    """Fills every parameter and buffer in place.

    Norms are ones; matrices are normal with the deviation of `init_std`, drawn on `draw_on`, by default where they lie.
    Same bits on any mesh of one device type to draw on. Communication: none. Memory: one band at a time.
    """
    for name, parameter in model.named_parameters():
        local, offsets = part_of(name, parameter)
        std = parameter_std(name, model.config)
        if std is None:
            local.fill_(1.0)
        elif local.numel():
            device = local.device if draw_on is None else draw_on
            _fill_normal(local, offsets, parameter.shape, seed=parameter_seed(seed, name), std=std, device=device)
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


def _fill_normal(
    local: torch.Tensor, offsets: tuple[int, ...], shape: torch.Size, *, seed: int, std: float, device: torch.device
) -> None:
    band_rows = min(shape[0], max(1, _BAND_ELEMENTS // shape[1:].numel()))
    first_row, end_row = offsets[0], offsets[0] + local.shape[0]
    columns = tuple(slice(start, start + size) for start, size in zip(offsets[1:], local.shape[1:], strict=True))
    for band in range(first_row // band_rows, -(-end_row // band_rows)):
        band_start = band * band_rows
        start, stop = max(first_row, band_start), min(end_row, band_start + band_rows)
        generator = torch.Generator(device).manual_seed((seed + band) & ((1 << 63) - 1))
        values = torch.empty((band_rows, *shape[1:]), dtype=torch.float32, device=device)
        values.normal_(0.0, std, generator=generator)
        rows = values[(slice(start - band_start, stop - band_start), *columns)]
        local[start - first_row : stop - first_row].copy_(rows)
