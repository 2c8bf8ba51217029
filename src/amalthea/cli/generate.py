"""`amalthea generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def generate_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What the text begins with.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to add at most.")] = 100,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.8,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the likeliest tokens of this total probability.")
    ] = 0.95,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")] = 0,
    checkpoint: Annotated[
        int | None,
        typer.Option(
            "--checkpoint", metavar="STEP", help="Step of the checkpoint; default: the newest.", show_default=False
        ),
    ] = None,
) -> None:
    """Continue a text with a trained run."""
    from amalthea.config.load import load_config
    from amalthea.core.errors import ConfigError
    from amalthea.data.tokenizer import Tokenizer
    from amalthea.launch.manifest import TOKENIZER_FILE
    from amalthea.train.generate import Sampling, find_checkpoint, generate, load_model

    if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python marks bytes that are no text
        raise ConfigError("--prompt is not valid UTF-8; check the encoding of the terminal or file that it came from")
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    config = load_config(run_dir)
    path = find_checkpoint(run_dir, step=checkpoint)
    tokenizer = Tokenizer.load(run_dir / TOKENIZER_FILE)
    model = load_model(config, path)
    sys.stdout.write(prompt)
    for piece in generate(model, tokenizer, prompt, sampling=sampling):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
