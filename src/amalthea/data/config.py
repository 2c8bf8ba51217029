"""Where the text comes from and how it becomes batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from amalthea.core.component import Component


class TokenizerConfig(Component):
    """A byte-level BPE, trained on the corpus or taken from a file."""

    vocab_size: PositiveInt = 8192
    """Tokens to train for; a tokenizer from a file has its own number."""
    path: Path | None = None
    """A `tokenizer.json` to use instead of training one."""


class DataConfig(Component):
    """Corpus, tokenizer, mixture and packing."""

    path: str = "demo"
    """`demo`, or a folder of `.txt` and `.jsonl` files."""
    seq_len: PositiveInt = 4096
    """Tokens in one packed sequence."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    temperature: NonNegativeFloat = 0.5
    """Languages are drawn in proportion to tokens ** temperature: 1 as they come, 0 evenly."""
    weights: dict[str, float] | None = None
    """Fixed weights by language code instead of the temperature."""
    max_bytes_per_language: PositiveInt | None = None
    """Use about this many bytes of each language's text, chosen by a hash; none uses all of it."""
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of documents held out, chosen by a hash of the document."""
    val_tokens_per_language: NonNegativeInt = 8192
    """At most this many held-out tokens are scored in each language."""
