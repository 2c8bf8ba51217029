"""Blocks, and groups of blocks whose parameters are gathered together.

Shape legend: B sequences, S tokens per sequence, D hidden, L layers, E experts, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from amalthea.kernels.attention import Documents
from amalthea.model.attention import Attention, Rope
from amalthea.model.config import ModelConfig
from amalthea.model.moe import MoE, SwiGLU


class BlockOutput(NamedTuple):
    """What one block, or a group of them, returns. Counts and maxima are values, never side effects: running a block
    twice cannot count twice."""

    hidden: torch.Tensor
    """[B, S, D]."""
    counts: torch.Tensor
    """Choices of each expert in each MoE layer, int64 [MoE layers, E]."""
    router_losses: torch.Tensor
    """Balance loss and z-loss summed over tokens and layers, fp32 [2]."""
    max_logits: torch.Tensor
    """Largest attention logit of each head, fp32 [L, H]; [L, 0] where it is not tracked."""


class Block(nn.Module):
    """Pre-norm attention, then experts or, in the first layers by choice, a dense feed-forward."""

    def __init__(self, config: ModelConfig, *, is_dense: bool) -> None:
        super().__init__()
        self.num_experts = config.moe.num_experts
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
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
            return BlockOutput(x + self.mlp(normed), counts, losses, max_logits[None])
        assert self.moe is not None
        out, counts, losses = self.moe(normed)
        return BlockOutput(x + out, counts[None], losses, max_logits[None])


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
        max_logits = torch.stack([output.max_logits for output in outputs])
        return BlockOutput(
            torch.cat([output.hidden for output in outputs]),
            torch.stack([output.counts for output in outputs]).sum(dim=0),
            torch.stack([output.router_losses for output in outputs]).sum(dim=0),
            max_logits.amax(dim=0) if max_logits.numel() else max_logits[0],
        )

    def run(self, hidden: torch.Tensor, documents: Documents, rope: Rope) -> BlockOutput:
        """All blocks on one pass's sequences."""
        outputs = []
        for block in self.blocks:
            outputs.append(block(hidden, documents, rope))
            hidden = outputs[-1].hidden
        return join_layers(outputs)


def join_layers(outputs: list[BlockOutput]) -> BlockOutput:
    """Outputs of consecutive layers as one: the last hidden, the rest layer by layer."""
    return BlockOutput(
        outputs[-1].hidden,
        torch.cat([output.counts for output in outputs]),
        torch.stack([output.router_losses for output in outputs]).sum(dim=0),
        torch.cat([output.max_logits for output in outputs]),
    )
