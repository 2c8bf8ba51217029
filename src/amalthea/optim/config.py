"""Optimizers and the learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from amalthea.core.component import Component

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdamWConfig(Component):
    """AdamW, for embeddings, head, norms, router and biases, and for matrices by choice."""

    lr: PositiveFloat = 3e-4
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1


class MuonConfig(Component):
    """Muon, for matrices: momentum, then orthogonalization by Newton-Schulz."""

    lr: PositiveFloat = 3e-4
    momentum: Momentum = 0.95
    nesterov: bool = True
    weight_decay: NonNegativeFloat = 0.1
    num_steps: PositiveInt = 5
    """Newton-Schulz steps."""
    coefficients: Literal["quintic", "polar_express", "youj"] = "quintic"
    """Polynomials of the Newton-Schulz steps; `youj` exists for five steps."""
    form: Literal["standard", "gram"] = "standard"
    """`gram` iterates the Gram matrix of matrices that are wide or tall enough, with restarts."""
    products: Literal["bf16", "fp32"] = "bf16"
    """Dtype of Newton-Schulz's matrix products. Momenta enter and updates leave in bf16 either way; `fp32` is several
    times faster on CPUs that have no bf16 instructions."""
    per_head: bool = False
    """Orthogonalize the query, key and value projections head by head."""
    momentum_dtype: Literal["fp32", "bf16"] = "fp32"
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """`match_rms_adamw` scales by 0.2·√max(rows, columns), so that AdamW's learning rates carry over."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.coefficients == "youj" and self.num_steps != 5:
            raise ValueError(
                f"coefficients is youj, which exists for five steps only, but num_steps is {self.num_steps}; "
                "set num_steps=5 or take polar_express"
            )
        return self


class ScheduleConfig(Component):
    """The learning rate as a factor over steps."""

    kind: Literal["wsd", "cosine", "constant"] = "wsd"
    """Warmup-stable-decay, cosine, or constant after warmup."""
    warmup_steps: NonNegativeInt = 0
    decay_fraction: Fraction = 0.2
    """Last part of the run in which `wsd` decays linearly."""
    min_factor: Fraction = 0.1
    """Factor at the last step."""


class OptimConfig(Component):
    """Which optimizer takes which parameters."""

    experts: Literal["muon", "adamw"] = "muon"
    """For the routed experts' matrices."""
    matrices: Literal["muon", "adamw"] = "muon"
    """For every other matrix between hidden layers."""
    by_name: dict[str, Literal["muon", "adamw"]] = Field(default_factory=dict)
    """Exceptions by parameter name: {"blocks.*.attn.wo.weight": "adamw"}. The first that matches counts."""
    replicas: Literal["owning", "repeated"] = "owning"
    """With replicas: `owning` gives each of Muon's matrices one replica, which alone keeps its momentum and computes
    its update; `repeated` all-reduces gradients and lets every replica do all the work."""
    qk_clip: PositiveFloat | None = None
    """Bound on attention logits: after a step, query and key weights of a head above it are scaled down to it. For
    models without `qk_norm`, which bounds logits by itself."""
    adamw: AdamWConfig = AdamWConfig()
    muon: MuonConfig = MuonConfig()
    schedule: ScheduleConfig = ScheduleConfig()
