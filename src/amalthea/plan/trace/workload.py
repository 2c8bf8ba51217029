"""What a step works on, as far as a trace depends on it: documents' lengths and experts' loads, no values.

Shape legend: B sequences, S tokens per sequence, T tokens of a pass, K choices, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.data.batch import Batch


class _Shapes(Batch):
    """A batch whose labels all count."""

    @property
    def num_labels(self) -> int:
        return self.labels.numel()


@dataclass(frozen=True)
class Workload:
    """The same for every rank, layer and sequence."""

    document_tokens: int | None = None
    """Tokens of each document, the last of a sequence being shorter; none: one document fills it."""
    expert_load: tuple[float, ...] | None = None
    """Relative load of each expert; none: balanced."""

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError where it does not fit the model."""
        problems = []
        if self.document_tokens is not None and self.document_tokens < 1:
            problems.append(f"document_tokens is {self.document_tokens}; give 1 token or more")
        moe = config.model.moe
        if self.expert_load is not None:
            if len(self.expert_load) != moe.num_experts:
                problems.append(
                    f"expert_load has {len(self.expert_load)} entries; give one for each of "
                    f"the {moe.num_experts} experts"
                )
            elif min(self.expert_load) < 0 or sum(self.expert_load) <= 0:
                problems.append("expert_load has a negative entry or no positive one; give shares of the load")
            elif max(self.expert_load) * moe.top_k > sum(self.expert_load) * (1 + 1e-9):
                problems.append(
                    f"expert_load gives one expert {max(self.expert_load) / sum(self.expert_load):.3f} of all choices; "
                    f"a token chooses {moe.top_k} different experts, so give at most {1 / moe.top_k:.3f}"
                )
        if problems:
            raise ConfigError(*problems)

    def document_lengths(self, seq_len: int) -> tuple[int, ...]:
        """Of one sequence; they sum to `seq_len`."""
        length = min(self.document_tokens or seq_len, seq_len)
        rest = seq_len % length
        return (length,) * (seq_len // length) + ((rest,) if rest else ())

    def attention_pairs(self, seq_len: int) -> float:
        """(query, key) pairs per token that causal attention inside documents looks at."""
        return sum(length * (length + 1) / 2 for length in self.document_lengths(seq_len)) / seq_len

    def batch(self, num_sequences: int, seq_len: int) -> Batch:
        """Tokens and labels [B, S] without values: make it where tensors are fake."""
        shape = (num_sequences, seq_len)
        lengths = (self.document_lengths(seq_len),) * num_sequences
        tokens, labels = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
        return _Shapes(tokens, labels, lengths, ("xx",) * num_sequences)

    def rows_by_expert(self, num_tokens: int, *, num_experts: int, top_k: int) -> list[int]:
        """How many of a pass's T · K rows go to each expert: whole numbers that sum to it."""
        load = self.expert_load or (1.0,) * num_experts
        total, rows = sum(load), num_tokens * top_k
        exact = [rows * share / total for share in load]
        counts = [int(value) for value in exact]
        by_rest = sorted(range(num_experts), key=lambda e: (counts[e] - exact[e], e))
        for expert in by_rest[: rows - sum(counts)]:
            counts[expert] += 1
        return counts
