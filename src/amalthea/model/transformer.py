"""The model as a whole: embedding, blocks, final norm, head.

Shape legend: B sequences, S tokens per sequence, D hidden, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn

from amalthea.kernels.attention import Documents
from amalthea.kernels.vocab_loss import token_losses, vocab_loss_sum
from amalthea.model.attention import Attention, Rope
from amalthea.model.config import ModelConfig
from amalthea.model.moe import MoE, SwiGLU


class BlockOutput(NamedTuple):
    hidden: torch.Tensor
    """[B, S, D]."""
    counts: torch.Tensor
    """Choices of each expert, int64 [E]; empty for a dense layer."""
    router_losses: torch.Tensor
    """Balance loss and z-loss summed over tokens, fp32 [2]."""
    max_logits: torch.Tensor
    """Largest attention logit of each head, fp32 [H]; empty where it is not tracked."""


class Block(nn.Module):
    """Pre-norm attention, then experts or, in the first layers by choice, a dense feed-forward."""

    def __init__(self, config: ModelConfig, *, is_dense: bool) -> None:
        super().__init__()
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
            counts = torch.empty(0, dtype=torch.int64, device=x.device)
            losses = torch.zeros(2, dtype=torch.float32, device=x.device)
            return BlockOutput(x + self.mlp(normed), counts, losses, max_logits)
        assert self.moe is not None
        out, counts, losses = self.moe(normed)
        return BlockOutput(x + out, counts, losses, max_logits)


class Head(nn.Module):
    """Vocabulary projection: logits, or the loss without whole logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.chunk_tokens = config.loss_chunk_tokens
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None, per_token: bool) -> torch.Tensor:
        """hidden [B, S, D] → logits [B, S, V]; with labels [B, S] the summed loss, or each token's [B, S]."""
        if labels is None:
            return F.linear(hidden, self.weight)
        loss = token_losses if per_token else vocab_loss_sum
        out = loss(hidden.flatten(0, 1), self.weight, labels.flatten(), chunk_tokens=self.chunk_tokens)
        return out.view_as(labels) if per_token else out


class ModelOutput(NamedTuple):
    result: torch.Tensor
    """Logits [B, S, V]; or the loss summed over labels; or each token's loss [B, S]."""
    counts: torch.Tensor
    """Choices of each expert in each MoE layer, int64 [MoE layers, E]."""
    router_losses: torch.Tensor
    """Balance loss and z-loss summed over layers and tokens, fp32 [2]."""
    max_logits: torch.Tensor
    """Largest attention logit of each head in each layer, fp32 [L, H]; [L, 0] where it is not tracked."""


class Transformer(nn.Module):
    """A decoder-only mixture-of-experts language model.

    Build it under `torch.device("meta")`, place it, `to_empty`, then initialise (`model/init.py`).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rope = Rope(config)
        self.blocks = nn.ModuleList(
            Block(config, is_dense=layer < config.num_dense_layers) for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = Head(config)
        self._tie()

    def _tie(self) -> None:
        if self.config.tie_embeddings:
            self.head.register_parameter("weight", self.embed.get_parameter("weight"))

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Self:
        """Ties again after `to_empty` and the like, which make a new parameter for each of its places."""
        super()._apply(fn, recurse)
        self._tie()
        return self

    def forward(
        self,
        tokens: torch.Tensor,
        documents: Documents,
        labels: torch.Tensor | None = None,
        per_token: bool = False,
    ) -> ModelOutput:
        """Shapes: tokens and labels int64 [B, S]. See `ModelOutput` for what comes back."""
        hidden = self.embed(tokens)
        outputs = []
        for block in self.blocks:
            output = block(hidden, documents, self.rope)
            hidden = output.hidden
            outputs.append(output)
        result = self.head(self.norm(hidden), labels, per_token)
        counts = [output.counts for output in outputs if output.counts.numel()]
        no_counts = torch.empty(0, self.config.moe.num_experts, dtype=torch.int64, device=hidden.device)
        return ModelOutput(
            result,
            torch.stack(counts) if counts else no_counts,
            torch.stack([output.router_losses for output in outputs]).sum(dim=0),
            torch.stack([output.max_logits for output in outputs]),
        )

    def moe_layers(self) -> list[MoE]:
        """The mixture-of-experts modules in order of layers, one for each row of `ModelOutput.counts`."""
        return [block.moe for block in self.blocks if isinstance(block.moe, MoE)]  # type: ignore[union-attr]
