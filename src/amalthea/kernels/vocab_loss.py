"""Cross-entropy over the vocabulary in chunks of tokens, so that logits are never whole.

The training loss computes its gradients in the forward pass, while a chunk's logits are at hand: nothing is
computed twice and one chunk's buffer serves all.

Shape legend: T tokens, D hidden, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def vocab_loss_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_tokens: int,
    ignored: int = -100,
) -> torch.Tensor:
    """Sum over tokens of −log softmax(hidden · weightᵀ)[label].

    Shapes: hidden [T, D]; weight [V, D]; labels int64 [T], `ignored` where a token carries no loss. Returns an
    fp32 scalar. Memory: one [C, V] buffer in fp32 and the two gradients, made in forward.
    """
    return _VocabLoss.apply(hidden, weight, labels, chunk_tokens, ignored)  # type: ignore[no-any-return]


@torch.no_grad()
def token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_tokens: int,
    ignored: int = -100,
) -> torch.Tensor:
    """−log softmax(hidden · weightᵀ)[label] of each token, 0 where ignored: fp32 [T], without gradients."""
    chunks = zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    return torch.cat(
        [
            F.cross_entropy(F.linear(h, weight).float(), label, ignore_index=ignored, reduction="none")
            for h, label in chunks
        ]
    )


def vocab_loss_plain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, ignored: int = -100
) -> torch.Tensor:
    """Twin of `vocab_loss_sum` with whole logits."""
    logits = F.linear(hidden, weight)
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return F.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")


class _VocabLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_tokens: int,
        ignored: int,
    ) -> torch.Tensor:
        if not any(ctx.needs_input_grad):
            return token_losses(hidden, weight, labels, chunk_tokens=chunk_tokens, ignored=ignored).sum()
        hidden_grad = torch.empty_like(hidden)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        weight_grad = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        losses = []
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            kept = labels[chunk] != ignored
            loss, logits_grad = _chunk(hidden[chunk], weight, labels[chunk], kept)
            losses.append(loss)
            # Rows without a label get no gradient. Their zeros go in where rows are D wide, not V.
            torch.mm(logits_grad, weight, out=hidden_grad[chunk]).mul_(kept[:, None])
            _add_product(weight_grad, logits_grad, hidden[chunk] * kept[:, None])
        ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0]
        return hidden_grad * scale, weight_grad * scale, None, None, None


def _chunk(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of one chunk and the gradient by its logits, which overwrites them."""
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    picked = labels.where(kept, 0)[:, None]
    torch.log_softmax(logits, dim=-1, out=logits)
    loss = -(logits.gather(1, picked)[:, 0] * kept).sum()
    logits.exp_().scatter_add_(1, picked, torch.full_like(picked, -1, dtype=logits.dtype))
    return loss, logits.to(weight.dtype)


def _add_product(total: torch.Tensor, logits_grad: torch.Tensor, hidden: torch.Tensor) -> None:
    if logits_grad.dtype == total.dtype:
        total.addmm_(logits_grad.T, hidden)
    else:
        total.add_(logits_grad.T @ hidden)
