"""Records of a run that looks like a real one: a falling loss, 24 languages, experts that even out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from rich.console import Console

from amalthea.config.run import LoggingConfig
from amalthea.core.world import World
from amalthea.train.records import Recorder, StepRecord, ValidationRecord

LANGUAGES = [
    "bg",
    "cs",
    "da",
    "de",
    "el",
    "en",
    "es",
    "et",
    "fi",
    "fr",
    "ga",
    "hr",
    "hu",
    "it",
    "lt",
    "lv",
    "mt",
    "nl",
    "pl",
    "pt",
    "ro",
    "sk",
    "sl",
    "sv",
]


def step_record(step: int, *, total: int = 300, layers: int = 4, experts: int = 16, **changes) -> StepRecord:
    """Step `step` of a run of `total` steps; `changes` replace fields."""
    draw = np.random.default_rng(step)
    logits = draw.normal(0.0, 0.1 + 0.5 * math.exp(-step / 40), (layers, experts))
    load = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    imbalance = load.max(axis=1) * experts
    first = step == 1
    step_s = float((2.4 if first else 0.62) + abs(draw.normal(0, 0.03)))
    lr = 3e-4 * min(1.0, step / 20, max(0.1, (total - step) / (0.2 * total)))
    figures = {
        "step": step,
        "loss": 4.4 + 4.7 * math.exp(-step / 45) + float(draw.normal(0, 0.07)),
        "grad_norm": 0.6 + 3 * math.exp(-step / 15) + float(abs(draw.normal(0, 0.08))),
        "lr": lr,
        "tokens": 8192 * step,
        "tokens_per_s": 8192 / step_s,
        "step_s": step_s,
        "data_s": 0.012,
        "peak_allocated_bytes": 1_400_000_000,
        "peak_reserved_bytes": 1_700_000_000,
        "expert_imbalance": float(imbalance.max()),
        "expert_imbalance_by_layer": tuple(map(float, imbalance)),
        "expert_load": tuple(tuple(map(float, layer)) for layer in load),
        "tokens_by_language": {"mt": 4000, "en": 4192},
    }
    return StepRecord(**(figures | changes))


def validation_record(step: int, *, seed: int = 0) -> ValidationRecord:
    """A validation over the 24 languages; each falls in its own pace."""
    draw = np.random.default_rng(seed)
    end = {code: float(value) for code, value in zip(LANGUAGES, draw.uniform(1.9, 2.9, 24), strict=True)}
    bits = {code: value + (4.2 - 0.6 * value) * math.exp(-step / 50) for code, value in end.items()}
    return ValidationRecord(
        step=step,
        loss=4.5 + 4.6 * math.exp(-step / 45),
        bits_per_byte=bits,
        mean_bits_per_byte=sum(bits.values()) / len(bits),
        seconds=3.2,
        tokens=196_608,
    )


def record_run(
    folder: Path, *, steps: int, every: int | None = 100, layers: int = 4, experts: int = 16, tensorboard: bool = False
) -> Path:
    """Records such a run into `folder`, with validations every `every` steps, and says nothing on the console."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"recipe": "quickstart", "train": {"steps": steps}}))
    (folder / "manifest.json").write_text(json.dumps({"seed": 0}))
    logging = LoggingConfig(tensorboard=tensorboard)
    console = Console(quiet=True)
    with Recorder(folder, world=World(), logging=logging, total_steps=steps, console=console) as recorder:
        for step in range(steps + 1):
            if step:
                recorder.step(step_record(step, total=steps, layers=layers, experts=experts))
            if every and (step % every == 0 or step == steps):
                recorder.validation(validation_record(step))
    return folder
