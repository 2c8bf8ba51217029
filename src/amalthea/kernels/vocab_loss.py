"""Cross-entropy over the vocabulary in chunks of tokens, so that logits are never whole.

The training loss computes its gradients in the forward pass, while a chunk's logits are at hand: nothing is
computed twice and one chunk's buffer serves all.

Shape legend: T tokens, D hidden, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from amalthea.core.errors import ConfigError
from amalthea.core.units import GIB
from amalthea.kernels.device import on_host
from amalthea.kernels.products import add_product_fp32, product_fp32, sums_in_fp32


def chunk_tokens(*, budget_gib: float, vocab_size: int, dtype: torch.dtype) -> int:
    """The most tokens in a chunk whose logits, with what is made of them, stay within a budget.

    `dtype` is the model's: logits are held in fp32, and below fp32 a second time in `dtype`. Raises ConfigError where
    the budget holds not one token.
    """
    bytes_per_logit = 4 if dtype == torch.float32 else 4 + dtype.itemsize
    tokens = int(budget_gib * GIB) // (vocab_size * bytes_per_logit)
    if tokens < 1:
        needed_gib = vocab_size * bytes_per_logit / GIB
        raise ConfigError(
            f"memory.loss_budget_gib is {budget_gib}, but the logits of one token over {vocab_size} entries take "
            f"{needed_gib:.2g} GiB; set it to {needed_gib * 256:.2g} or more for chunks of 256 tokens"
        )
    return tokens


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
        buffer = weight_grad.new_empty((min(chunk_tokens, len(hidden)), len(weight)))
        losses = []
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            kept = labels[chunk] != ignored
            logits = _product(hidden[chunk], weight, out=buffer[: len(kept)])
            losses.append(_losses_and_gradient(logits, labels[chunk].where(kept, 0)[:, None]).where(kept, 0.0).sum())
            if on_host(logits) and _has_values(logits) and losses[-1].isinf():
                # The softmax of a label was too small for its logarithm.
                losses[-1] = token_losses(
                    hidden[chunk], weight, labels[chunk], chunk_tokens=chunk_tokens, ignored=ignored
                ).sum()
            logits_grad = logits.to(weight.dtype)
            # Rows without a label get no gradient. Their zeros go in where rows are D wide, not V.
            torch.mm(logits_grad, weight, out=hidden_grad[chunk]).mul_(kept[:, None])
            _add_product(weight_grad, logits_grad, hidden[chunk] * kept[:, None])
            del logits_grad  # else it would lie beside the next chunk's product
        ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0]
        return hidden_grad * scale, weight_grad * scale, None, None, None


def _product(hidden: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    if out.dtype == weight.dtype:
        return torch.mm(hidden, weight.T, out=out)
    return product_fp32(hidden, weight.T, out=out) if sums_in_fp32(hidden, weight) else out.copy_(hidden @ weight.T)


def _losses_and_gradient(logits: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Each row's loss [C]; overwrites the logits by the gradient: softmax, less one at the label `picked` [C, 1].

    On a CPU the softmax is one pass over rows in cache and its exponentials are not taken again; a loss beyond the
    logarithm of the smallest normal number comes out infinite.
    """
    if on_host(logits):
        torch.softmax(logits, dim=-1, out=logits)
        losses = -F.threshold(logits.gather(1, picked), torch.finfo(logits.dtype).tiny, 0.0).log()
    else:
        torch.log_softmax(logits, dim=-1, out=logits)
        losses = -logits.gather(1, picked)
        logits.exp_()
    logits.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=logits.dtype))
    return losses[:, 0]


def _has_values(tensor: torch.Tensor) -> bool:
    """False of a fake tensor."""
    return type(tensor) is torch.Tensor


def _add_product(total: torch.Tensor, logits_grad: torch.Tensor, hidden: torch.Tensor) -> None:
    if logits_grad.dtype == total.dtype:
        total.addmm_(logits_grad.T, hidden)
    elif sums_in_fp32(logits_grad, hidden):
        add_product_fp32(total, logits_grad.T, hidden)
    else:
        total.add_(logits_grad.T @ hidden)
