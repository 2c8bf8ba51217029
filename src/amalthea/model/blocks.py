"""Blocks, and groups of blocks whose parameters are gathered together.

Shape legend: B sequences, S tokens per sequence, D hidden, L layers, E experts, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn

from amalthea.kernels.attention import Documents
from amalthea.kernels.saved import another_follows
from amalthea.model.attention import Attention, Rope
from amalthea.model.config import ModelConfig
from amalthea.model.moe import MoE, SwiGLU
from amalthea.model.norm import RMSNorm


class LayerFigures(NamedTuple):
    """What layers tell about themselves, as values and never as side effects: running one twice cannot count twice."""

    counts: torch.Tensor
    """Choices of each expert in each MoE layer, int64 [MoE layers, E]."""
    router_losses: torch.Tensor
    """Balance loss and z-loss summed over tokens and layers, fp32 [2]."""
    max_logits: torch.Tensor
    """Largest attention logit of each head, fp32 [L, H]; [L, 0] where it is not tracked."""


class BlockOutput(NamedTuple):
    """Of one block, or of several. Whoever collects figures must let `hidden` go."""

    hidden: torch.Tensor
    """[B, S, D]."""
    figures: LayerFigures


class Block(nn.Module):
    """Pre-norm attention, then experts or, in the first layers by choice, a dense feed-forward."""

    def __init__(self, config: ModelConfig, *, is_dense: bool) -> None:
        super().__init__()
        self.num_experts = config.moe.num_experts
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp: SwiGLU | None = None
        self.moe: MoE | None = None
        if is_dense:
            assert config.dense_hidden_size is not None, "checked by ModelConfig"
            self.mlp = SwiGLU(config.hidden_size, config.dense_hidden_size)
        else:
            self.moe = MoE(config.hidden_size, config.moe)

    def forward(self, x: torch.Tensor, documents: Documents, rope: Rope) -> BlockOutput:
        attended, max_logits = self.attn(self.attn_norm(x), documents, rope)
        x = x + attended
        normed = self.ffn_norm(x)
        if self.mlp is not None:
            counts = torch.empty(0, self.num_experts, dtype=torch.int64, device=x.device)
            losses = torch.zeros(2, dtype=torch.float32, device=x.device)
            return BlockOutput(x + self.mlp(normed), LayerFigures(counts, losses, max_logits[None]))
        assert self.moe is not None
        out, counts, losses = self.moe(normed)
        return BlockOutput(x + out, LayerFigures(counts[None], losses, max_logits[None]))


GroupRunner = Callable[[torch.Tensor, Documents, Rope], BlockOutput]


class BlockGroup(nn.Module):
    """Consecutive blocks that are gathered, recomputed and offloaded as one.

    `sequences_per_pass` cuts the batch: the group runs its blocks for so many sequences, then for the next, all under
    one gather of its parameters; none takes the batch whole. `runner` carries out one pass; the memory layer wraps it
    to recompute and offload.
    """

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.sequences_per_pass: int | None = None
        self.runner: GroupRunner = self.run

    def forward(self, hidden: torch.Tensor, documents: Documents, rope: Rope) -> BlockOutput:
        """hidden [B, S, D]; B must be a multiple of `sequences_per_pass`."""
        size = self.sequences_per_pass or hidden.shape[0]
        if size == hidden.shape[0]:
            return self.runner(hidden, documents, rope)
        parts = zip(hidden.split(size), documents.split(size), strict=True)
        outputs = [self.runner(part, part_documents, rope) for part, part_documents in parts]
        return BlockOutput(torch.cat([output.hidden for output in outputs]), _add_passes([o.figures for o in outputs]))

    def run(self, hidden: torch.Tensor, documents: Documents, rope: Rope) -> BlockOutput:
        """All blocks on one pass's sequences."""
        figures = []
        for number, block in enumerate(self.blocks, start=1):
            with another_follows() if number < len(self.blocks) else nullcontext():
                hidden, block_figures = block(hidden, documents, rope)
            figures.append(block_figures)
        return BlockOutput(hidden, join_layers(figures))


def join_layers(figures: list[LayerFigures]) -> LayerFigures:
    """Figures of consecutive layers as one."""
    return LayerFigures(
        torch.cat([layer.counts for layer in figures]),
        torch.stack([layer.router_losses for layer in figures]).sum(dim=0),
        torch.cat([layer.max_logits for layer in figures]),
    )


def _add_passes(figures: list[LayerFigures]) -> LayerFigures:
    """Figures of the same layers over several passes."""
    max_logits = torch.stack([one.max_logits for one in figures])
    return LayerFigures(
        torch.stack([one.counts for one in figures]).sum(dim=0),
        torch.stack([one.router_losses for one in figures]).sum(dim=0),
        max_logits.amax(dim=0) if max_logits.numel() else max_logits[0],
    )
