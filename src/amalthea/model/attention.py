"""Grouped-query attention and the RoPE cache that all layers share.

Shape legend: B sequences, S tokens per sequence, D hidden, H query heads, G key/value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import nn

from amalthea.kernels.attention import Documents, attention
from amalthea.kernels.max_logits import max_logits
from amalthea.kernels.rope import rotate
from amalthea.model.config import ModelConfig
from amalthea.model.norm import RMSNorm


class Rope(nn.Module):
    """Cosines and sines of all positions: two fp32 buffers [max_seq_len, d/2], one pair for the whole model.

    Blocks are given the module when they are called and do not own it, so the storage stays one. The buffers are
    not saved; `reset` fills them again after `to_empty`.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        self.fuse = True
        shape = (config.max_seq_len, config.head_dim // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Fills the buffers in place. Source: RoFormer (arXiv 2104.09864)."""
        device = self.cos.device
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        positions = torch.arange(self.cos.shape[0], dtype=torch.float32, device=device)
        angles = positions[:, None] * (1.0 / self.theta**exponents)
        torch.cos(angles, out=self.cos)
        torch.sin(angles, out=self.sin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates x [B, S, H, d] by its positions 0 … S − 1."""
        seq_len = x.shape[1]
        return rotate(x, self.cos[:seq_len], self.sin[:seq_len], fuse=self.fuse)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Documents], tuple[torch.Tensor, torch.Tensor]]
"""Queries [B, S, H, d], keys and values [B, S, G, d] of whole sequences → [B, S, H, d], largest logits [H] or [0]."""


class Exchange(Protocol):
    """Whole sequences for attention, where each rank holds a part of their positions."""

    def around(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `attend` would return for whole sequences: this rank's positions of it, and the logits of all heads.

        `attend` is given some heads of all positions, of all sequences or of one, with their documents.
        """
        ...


class Attention(nn.Module):
    """Causal attention inside documents, with optional RMSNorm on queries and keys.

    Where `track_max_logits` is set (for QK-clip), forward also returns the largest logit of each head. Context
    parallelism sets `exchange`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.track_max_logits = False
        self.exchange: Exchange | None = None
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.hidden_size, query_size, bias=False)
        self.wk = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.wv = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.wo = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: torch.Tensor, documents: Documents, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, S, D] → [B, S, D], and the largest logits fp32 [H], empty where they are not tracked.

        With an exchange S is this rank's part of the positions; `documents` are those of whole sequences.
        """
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents
        ) -> tuple[torch.Tensor, torch.Tensor]:
            query, key = rope(query), rope(key)
            out = attention(query, key, value, documents=documents)
            if self.track_max_logits:
                return out, max_logits(query, key, documents=documents)
            return out, torch.empty(0, dtype=torch.float32, device=x.device)

        around = attend if self.exchange is None else partial(self.exchange.around, attend=attend)
        out, largest = around(query, key, value, documents)
        return self.wo(out.flatten(-2)), largest
