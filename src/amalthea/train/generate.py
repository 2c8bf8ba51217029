"""Text from a trained run, on one process.

Shape legend: S tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from amalthea.checkpoint import store
from amalthea.checkpoint.folder import first_damage
from amalthea.config.run import RunConfig
from amalthea.core.errors import CheckpointError, ConfigError
from amalthea.data.tokenizer import Tokenizer
from amalthea.kernels.attention import Documents
from amalthea.model.transformer import Transformer


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the likeliest token; `top_p` keeps the likeliest tokens of that total probability."""

    max_tokens: int = 100
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.max_tokens < 1:
            problems.append(f"max-tokens is {self.max_tokens}; give 1 or more")
        if self.temperature < 0:
            problems.append(f"temperature is {self.temperature}; give 0 or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"top-p is {self.top_p}; give more than 0 and at most 1")
        if problems:
            raise ConfigError(*problems)


def load_model(config: RunConfig, checkpoint: Path) -> Transformer:
    """The whole model on this process's CPU in fp32, from a checkpoint of any mesh. Raises CheckpointError."""
    with torch.device("meta"):
        model = Transformer(config.model)
    model.to_empty(device="cpu")
    model.rope.reset()
    state = model.state_dict()
    if config.model.tie_embeddings:
        del state["head.weight"]
    tensors = {f"model.{name}": tensor for name, tensor in state.items()}
    store.load(checkpoint, tensors, strict=False)
    return model


def find_checkpoint(run_dir: Path, *, step: int | None = None) -> Path:
    """The newest whole checkpoint of a run, or that of `step`.

    Raises CheckpointError: there is none, or none of `step` (naming those there are), or that one is damaged.
    """
    if step is None:
        found = store.find_newest(run_dir)
        if found.path is None:
            raise CheckpointError(f"{run_dir} holds no whole checkpoint; train it first with --run-dir {run_dir}")
        return found.path
    path = run_dir / "checkpoints" / f"step_{step}"
    if not path.is_dir():
        there = sorted(p.name for p in path.parent.glob("step_*")) or ["none"]
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step}; there are: {', '.join(there)}")
    if damage := first_damage(path):
        raise CheckpointError(f"{path} is not whole: {damage}; leave the step out to take the newest whole one")
    return path


@torch.inference_mode()
def generate(model: Transformer, tokenizer: Tokenizer, prompt: str, *, sampling: Sampling) -> Iterator[str]:
    """Yields text piece by piece until the end of the document or `max_tokens`.

    The model sees at most its `max_seq_len` last tokens. The whole context is computed anew for each token: there
    is no key/value cache.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    begin, told = len(tokens), 0
    while len(tokens) - begin < sampling.max_tokens:
        context = torch.tensor([tokens[-model.config.max_seq_len :]])
        hidden_logits = model(context, Documents.whole(1, context.shape[1])).result[0, -1].float()
        token = _choose(hidden_logits, sampling, generator)
        if token == tokenizer.eos_id:
            return
        tokens.append(token)
        # A character may span tokens: tell only what decodes without a broken end.
        text = tokenizer.decode(tokens[begin:])
        if not text.endswith("�"):
            yield text[told:]
            told = len(text)


def _choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """logits [V] → a token."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = torch.softmax(logits / sampling.temperature, dim=-1).sort(descending=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.where(before < sampling.top_p, 0.0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
