"""One optimizer step.

The loss is a sum over tokens divided by the number of labels in the *global* batch, known before the first backward;
gradients are summed over ranks and microbatches. So the gradient is that of one process with the whole batch,
however the batch is cut.

Shape legend: B sequences, S tokens per sequence, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from amalthea.core.errors import TrainingError
from amalthea.data.batch import Batch
from amalthea.kernels.attention import Documents
from amalthea.model.transformer import ModelOutput
from amalthea.train.build import Run
from amalthea.train.qk_clip import attention_clip, clip_attention


@dataclass(frozen=True)
class StepResult:
    """Global figures of one step, on the host."""

    loss: float
    """Mean cross-entropy over labels, in nats, before the update."""
    balance_loss: float
    z_loss: float
    grad_norm: float
    expert_counts: tuple[tuple[int, ...], ...]
    """Tokens that each expert of each MoE layer received, [L][E]."""
    totals: tuple[float, ...]
    """What the caller gave as `tallies`, summed over ranks."""
    max_attention_logit: float | None = None
    """Before the update; only with QK-clip."""
    clipped_heads: int | None = None
    """Heads that QK-clip scaled down in this step."""


def train_step(run: Run, microbatches: Sequence[Batch], *, lr_factor: float, tallies: Iterable[float]) -> StepResult:
    """Forward, backward and update on this rank's microbatches; every rank calls it with as many.

    `tallies` are numbers of this rank (such as tokens by language) that ride along in the step's all-reduce.
    Communication beyond the model's own: the label count, the gradient norm, expert counts and the step's sums; one
    wait for the device, before the update, so that a non-finite step changes nothing.
    Raises TrainingError, on every rank alike, if the loss or the gradient norm is not finite.
    """
    # Ranks that share sequences all count them.
    num_labels = _global_sum(run, sum(batch.num_labels for batch in microbatches)) / run.mesh.cp
    nll_sum, router_losses, counts, max_logits = _accumulate(run, microbatches, num_labels)
    run.optimizers.reduce_over_replicas()
    norm = run.optimizers.grad_norm()

    tally = torch.tensor(list(tallies), dtype=torch.float64, device=run.device)
    sums = torch.cat((nll_sum[None], router_losses.double(), tally))
    dist.all_reduce(sums)
    dist.all_reduce(counts)
    clip = attention_clip(run, max_logits)
    clip_figures = sums.new_zeros(2) if clip is None else clip.figures
    host = torch.cat((sums, clip_figures, norm.double()[None], num_labels.double()[None])).tolist()
    nll, balance, z_loss, *totals, max_logit, clipped_heads, grad_norm, labels = host
    positions = run.config.train.global_batch_tokens
    result = StepResult(
        loss=nll / labels,
        balance_loss=balance / positions,
        z_loss=z_loss / positions,
        grad_norm=grad_norm,
        expert_counts=tuple(map(tuple, counts.tolist())),
        totals=tuple(totals),
        max_attention_logit=None if clip is None else max_logit,
        clipped_heads=None if clip is None else int(clipped_heads),
    )
    _check_finite(result)

    max_norm = run.config.train.max_grad_norm
    if max_norm is not None and grad_norm > max_norm:
        run.optimizers.scale_grads(norm=norm, max_norm=max_norm)
    run.optimizers.step(lr_factor=lr_factor)
    run.optimizers.zero_grad()
    if clip is not None:
        clip_attention(run, clip.factors)
    update_load_balance(run, counts)
    return result


def forward(run: Run, batch: Batch, *, per_token: bool = False) -> ModelOutput:
    """Runs the model on this rank's positions of a batch of whole sequences from the host."""
    documents = Documents(batch.document_lengths, batch.tokens.shape[1], run.device)
    tokens, labels = (positions(run, t).to(run.device, non_blocking=True) for t in (batch.tokens, batch.labels))
    return run.model(tokens, documents, labels, per_token)


def positions(run: Run, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of [B, S] along the positions; with context parallelism B sequences are shared."""
    return tensor.chunk(run.mesh.cp, dim=1)[run.mesh.cp_rank]


def _accumulate(
    run: Run, microbatches: Sequence[Batch], num_labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Leaves summed gradients; returns this rank's loss sum, router losses [2], expert counts [L, E] and the
    largest logits [L, H]."""
    positions = run.config.train.global_batch_tokens
    outputs = []
    for batch in microbatches:
        output = forward(run, batch)
        loss = output.result / num_labels + output.router_losses.sum() / positions
        loss.backward()
        outputs.append(ModelOutput(*(tensor.detach() for tensor in output)))
    results, counts, router_losses, max_logits = map(torch.stack, zip(*outputs, strict=True))
    largest = max_logits.amax(dim=0) if max_logits.numel() else max_logits[0]
    return results.double().sum(), router_losses.sum(0), counts.sum(0), largest


@torch.no_grad()
def update_load_balance(run: Run, counts: torch.Tensor) -> None:
    """Moves each bias by one step towards the mean load, in place, once per optimizer step.

    counts: int64 [L, E], summed over microbatches and ranks. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
    """
    rate = run.config.model.moe.bias_update_rate
    for moe, layer_counts in zip(run.model.moe_layers(), counts.double(), strict=True):
        direction = torch.sign(layer_counts.mean() - layer_counts)
        moe.router.bias.add_(direction.to(moe.router.bias.dtype), alpha=rate)


def _global_sum(run: Run, value: int) -> torch.Tensor:
    total = torch.tensor(value, dtype=torch.float32, device=run.device)
    dist.all_reduce(total)
    return total


def _check_finite(result: StepResult) -> None:
    bad = [
        name
        for name, value in (("loss", result.loss), ("gradient norm", result.grad_norm))
        if value - value != 0.0  # not finite
    ]
    if bad:
        raise TrainingError(
            f"the {' and the '.join(bad)} of this step is not finite; the weights were left as they were. "
            "Lower the learning rate or train.max_grad_norm and resume from the last checkpoint"
        )
