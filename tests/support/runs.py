"""Whole runs of a model small enough for tests: their corpus, their recipe, and what is left of them on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.corpora import made_up_texts, write_corpus
from support.tiny import tiny_config

from amalthea.checkpoint.store import load
from amalthea.checkpoint.storage import read_metadata
from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.pieces import Pieces
from amalthea.core.world import World
from amalthea.launch import train as launcher
from amalthea.train import loop
from amalthea.train.loop import TrainResult
from amalthea.train.records import Recorder, StepRecord

LANGUAGES = ("bg", "de", "mt")
VOCAB_SIZE = 389
"""Divisible by no number of ranks but one."""
STEPS = 8
SAVED_AT = 3
DIES_AFTER = 5
"""Every run saves after steps 3 and 6 (and the last); those that die do so after step 5."""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


# The run


def make_corpus(folder: Path) -> Path:
    """Three languages, two as `.jsonl` and one as `.txt` files; enough for more than one epoch in no language."""
    write_corpus(folder, {language: made_up_texts(language, documents=30) for language in LANGUAGES[:2]})
    (folder / LANGUAGES[2]).mkdir()
    for number, text in enumerate(made_up_texts(LANGUAGES[2], documents=30)):
        (folder / LANGUAGES[2] / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def run_config(corpus: Path, **overrides: Any) -> RunConfig:
    """`tiny_config` on a real corpus, with validation, checkpoints and a schedule; Muon for all matrices."""
    chosen: dict[str, Any] = {
        "model__vocab_size": VOCAB_SIZE,
        "data__path": str(corpus),
        "data__tokenizer__vocab_size": VOCAB_SIZE,
        "data__val_tokens_per_language": 200,
        "train__steps": STEPS,
        "train__microbatch_sequences": 2,
        "train__validate_every_steps": 4,
        "optim__experts": "muon",
        "optim__matrices": "muon",
        "optim__schedule__warmup_steps": 2,
        "model__moe__bias_update_rate": 0.01,
        "checkpoint__every_steps": SAVED_AT,
        "checkpoint__keep": 9,
        "logging__tensorboard": False,
        "logging__every_steps": 1,
    }
    return tiny_config(**chosen | overrides)
