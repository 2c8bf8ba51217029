"""One run: every component's configuration, and the checks that cross components."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from amalthea.checkpoint.config import CheckpointConfig
from amalthea.core.component import Component
from amalthea.data.config import DataConfig
from amalthea.memory.config import MemoryConfig
from amalthea.model.config import ModelConfig
from amalthea.optim.config import OptimConfig
from amalthea.parallel.config import ParallelConfig


class TrainConfig(Component):
    """Length of the run and size of a step."""

    steps: PositiveInt
    global_batch_tokens: PositiveInt
    """Tokens of one optimizer step over all ranks; a multiple of seq_len times the data-parallel ranks."""
    microbatch_sequences: PositiveInt = 1
    """Sequences that one rank takes through the model at a time (at most, where its share is smaller)."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this norm; none leaves them."""
    validate_every_steps: PositiveInt | None = 100
    """Validate before the first step, every so many steps and after the last; none switches it off."""


class LoggingConfig(Component):
    """What is written besides metrics.jsonl."""

    every_steps: PositiveInt = 10
    """Console lines where there is no live bar."""
    tensorboard: bool = True
    wandb: bool = False
    """Weights & Biases, offline, in the run folder; needs the `wandb` extra."""


class RunConfig(Component):
    """Everything that a run needs to know. Recipes return one; overrides change it; the run folder keeps it."""

    recipe: str
    """Name that the run folder takes."""
    seed: NonNegativeInt = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16` computes in bf16 on fp32 parameters."""
    flash_attention: Literal["auto", "torch", "fa3"] = "auto"
    """Kernels of attention on a GPU: `torch` has the second version of FlashAttention built in; `fa3`, the third, needs
    a Hopper GPU and its own package. `auto` takes it where both are there. A plan takes `auto` for `torch`."""
    kernels: Literal["fused", "eager"] = "fused"
    """On a GPU: `fused` compiles element-wise formulas, for which it needs Triton; `eager` runs torch's own kernels."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
