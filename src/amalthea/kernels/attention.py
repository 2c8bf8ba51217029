"""Causal attention inside documents.

Several documents are packed into one sequence; a token sees the earlier tokens of its own document only. On a
GPU that is one variable-length flash kernel. The CPU has none: there a batch of short documents goes through
one masked product, and long documents go one at a time, whichever costs less.

Shape legend: B sequences, S tokens per sequence, H query heads, G key/value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F

from amalthea.kernels.device import on_gpu

# What a call for one more document costs on a CPU, in score entries per head (measured: about 0.2 ms against
# 16 M entries a millisecond and head at d = 32).
_CALL_COST = 30_000


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a batch of packed sequences.

    `lengths[b]` are the lengths of sequence b's documents in order and sum to `seq_len`. Masks and offsets are
    made once per batch and shared by all layers.
    """

    lengths: tuple[tuple[int, ...], ...]
    seq_len: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        for row, lengths in enumerate(self.lengths):
            if sum(lengths) != self.seq_len or min(lengths, default=0) < 1:
                raise ValueError(
                    f"document lengths of sequence {row} are {lengths}; they must be positive and sum to "
                    f"seq_len {self.seq_len}"
                )

    @staticmethod
    def whole(batch: int, seq_len: int, *, device: torch.device | str = "cpu") -> Documents:
        """Each sequence is one document."""
        return Documents(((seq_len,),) * batch, seq_len, torch.device(device))

    @staticmethod
    def of(lengths: Sequence[Sequence[int]], seq_len: int, *, device: torch.device | str = "cpu") -> Documents:
        return Documents(tuple(tuple(row) for row in lengths), seq_len, torch.device(device))

    def split(self, num_sequences: int) -> tuple[Documents, ...]:
        """So many sequences at a time; made once, so that all layers share their masks and offsets."""
        if num_sequences not in self._parts:
            starts = range(0, len(self.lengths), num_sequences)
            self._parts[num_sequences] = tuple(
                Documents(self.lengths[start : start + num_sequences], self.seq_len, self.device) for start in starts
            )
        return self._parts[num_sequences]

    @cached_property
    def _parts(self) -> dict[int, tuple[Documents, ...]]:
        return {}

    @cached_property
    def flat_lengths(self) -> list[int]:
        return [length for row in self.lengths for length in row]

    @cached_property
    def max_length(self) -> int:
        return max(self.flat_lengths)

    @cached_property
    def are_whole(self) -> bool:
        """No sequence holds more than one document."""
        return all(len(row) == 1 for row in self.lengths)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int32 [documents + 1], where each document begins in the flattened batch."""
        ends = torch.tensor([0, *self.flat_lengths]).cumsum(0)
        return ends.to(torch.int32).to(self.device, non_blocking=True)

    @cached_property
    def mask(self) -> torch.Tensor:
        """bool [B, 1, S, S], true where a query (third) may see a key (fourth)."""
        lengths = torch.tensor(self.flat_lengths)
        document = torch.repeat_interleave(lengths, output_size=len(self.lengths) * self.seq_len)
        document = document.view(len(self.lengths), self.seq_len)
        same = document[:, :, None] == document[:, None, :]
        return same.tril_()[:, None].to(self.device, non_blocking=True)

    @cached_property
    def prefer_mask(self) -> bool:
        """Whether one masked product over whole sequences costs less than one call per document."""
        masked = len(self.lengths) * self.seq_len**2
        separate = sum(length**2 for length in self.flat_lengths) / 2 + _CALL_COST * len(self.flat_lengths)
        return masked <= separate


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, documents: Documents) -> torch.Tensor:
    """Softmax attention with scale d^-1/2, causal, inside documents.

    Shapes: query [B, S, H, d]; key and value [B, S, G, d] with H a multiple of G. Returns [B, S, H, d].
    """
    if on_gpu(query) and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, documents)
    if documents.are_whole:
        return _sdpa(query, key, value, is_causal=True)
    if documents.prefer_mask:
        return _sdpa(query, key, value, mask=documents.mask)
    return attention_by_document(query, key, value, documents=documents)


def attention_by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, documents: Documents
) -> torch.Tensor:
    """Twin of `attention` on every device: one causal product per document."""
    parts = [tensor.flatten(0, 1).split(documents.flat_lengths) for tensor in (query, key, value)]
    outputs = [_sdpa(q[None], k[None], v[None], is_causal=True)[0] for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outputs).view(query.shape)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        documents.offsets,
        documents.offsets,
        documents.max_length,
        documents.max_length,
        window_size=(-1, 0),
        enable_gqa=query.shape[2] != key.shape[2],
    )
    assert isinstance(out, torch.Tensor)
    return out.view(query.shape)
