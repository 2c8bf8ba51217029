"""The model as a whole: embedding, blocks, final norm, head.

Shape legend: B sequences, S tokens per sequence, D hidden, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import nn

from amalthea.kernels.attention import Documents
from amalthea.kernels.vocab_loss import token_losses, vocab_loss_sum
from amalthea.model.attention import Rope
from amalthea.model.blocks import Block, BlockGroup, join_layers
from amalthea.model.config import ModelConfig
from amalthea.model.moe import Experts, MoE, SwiGLU
from amalthea.model.norm import RMSNorm


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

    def __init__(self, config: ModelConfig, *, blocks_per_group: int = 1) -> None:
        super().__init__()
        self.config, self.blocks_per_group = config, blocks_per_group
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rope = Rope(config)
        blocks = [Block(config, is_dense=layer < config.num_dense_layers) for layer in range(config.num_layers)]
        self.groups = nn.ModuleList(
            BlockGroup(blocks[first : first + blocks_per_group]) for first in range(0, len(blocks), blocks_per_group)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = Head(config)
        self._tie()
        self.register_state_dict_post_hook(_rename_saved)
        self.register_load_state_dict_pre_hook(_rename_loaded)

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
        figures = []
        for group in self.groups:
            hidden, group_figures = group(hidden, documents, self.rope)
            figures.append(group_figures)
        result = self.head(self.norm(hidden), labels, per_token)
        return ModelOutput(result, *join_layers(figures))

    @property
    def blocks(self) -> list[Block]:
        """All blocks in order, whatever their grouping."""
        return [cast(Block, block) for group in self.groups for block in cast(BlockGroup, group).blocks]

    def moe_layers(self) -> list[MoE]:
        """The mixture-of-experts modules in order of layers, one for each row of `ModelOutput.counts`."""
        return [block.moe for block in self.blocks if block.moe is not None]

    def set_fused(self, enabled: bool) -> None:
        """Whether compiled kernels run on a GPU, as they do by default, or torch's own."""
        for module in self.modules():
            if isinstance(module, (Rope, Experts, SwiGLU)):
                module.fuse = enabled

    # Names are `blocks.LAYER.…` however blocks are grouped: weights, seeds and checkpoints do not depend on it.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield self._public_name(name), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield self._public_name(name), buffer

    def _public_name(self, name: str) -> str:
        def flat(match: re.Match[str]) -> str:
            return f"blocks.{int(match[1]) * self.blocks_per_group + int(match[2])}."

        return re.sub(r"groups\.(\d+)\.blocks\.(\d+)\.", flat, name, count=1)

    def _private_name(self, name: str) -> str:
        def nested(match: re.Match[str]) -> str:
            group, block = divmod(int(match[1]), self.blocks_per_group)
            return f"groups.{group}.blocks.{block}."

        return re.sub(r"(?<!\d\.)blocks\.(\d+)\.", nested, name, count=1)


def _rename_saved(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
    assert isinstance(module, Transformer)
    for name in list(state):
        state[module._public_name(name)] = state.pop(name)


def _rename_loaded(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: object) -> None:
    assert isinstance(module, Transformer)
    for name in list(state):
        state[module._private_name(name)] = state.pop(name)
