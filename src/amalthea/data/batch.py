"""What the data layer hands to training.

Shape legend: B sequences, S tokens per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

IGNORED = -100
"""Label of a position whose next token belongs to another document."""


@dataclass(frozen=True)
class Batch:
    """Packed sequences on the host.

    `tokens` and `labels` are int64 [B, S]; `labels[b, s]` is the token after `tokens[b, s]`, or `IGNORED` at a
    document's end. `document_lengths[b]` are the lengths of the documents (or parts of documents) of sequence
    b in order; they sum to S. `languages[b]` is the sequence's language code.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    document_lengths: tuple[tuple[int, ...], ...]
    languages: tuple[str, ...]

    @property
    def num_labels(self) -> int:
        """Tokens that carry loss."""
        return int((self.labels != IGNORED).sum())
