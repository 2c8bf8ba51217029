"""Validation: every held-out sequence once, on any number of ranks, in bits per byte by definition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import SEQ_LEN, tiny_batch, tiny_config

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.world import World
from amalthea.data.batch import IGNORED, Batch
from amalthea.kernels.attention import Documents
from amalthea.model.init import initialize
from amalthea.model.transformer import Transformer
from amalthea.train.build import build
from amalthea.train.records import ValidationRecord
from amalthea.train.validate import validate

NUM_SPECIAL = 40
"""Of 96 tokens, so that a good part of the labels are special."""

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "4-ep2": (4, {"parallel__ep": 2}),
    "4-hsdp-ep2": (4, {"parallel__dp_replicate": 2, "parallel__ep": 2}),
}


@dataclass(frozen=True)
class MadeUp:
    """Held-out text with another number of sequences in each language."""

    sequences: dict[str, int]

    @property
    def languages(self) -> tuple[str, ...]:
        return tuple(self.sequences)

    def num_sequences(self, language: str) -> int:
        return self.sequences[language]

    def batch(self, language: str, rows: range) -> Batch:
        assert rows.stop <= self.sequences[language]
        return tiny_batch(100 + self.languages.index(language), rows)


def token_bytes() -> torch.Tensor:
    """One to four bytes for each token, none for special ones."""
    sizes = torch.arange(96) % 4 + 1
    sizes[:NUM_SPECIAL] = 0
    return sizes


HELD_OUT = MadeUp({"bg": 5, "mt": 1, "xx": 3})


def score(world: World, config: RunConfig, held_out: MadeUp) -> tuple[ValidationRecord, list[str], bool]:
    """The record, what was said on the way, and whether weights and gradients stayed as they were."""
    run = build(config, resolve(config, world_size=world.size), world)
    before = {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}
    said: list[str] = []
    record = validate(run, held_out, token_bytes=token_bytes(), step=12, progress=said.append)
    is_untouched = all(parameter.grad is None for parameter in run.model.parameters())
    for name, tensor in run.model.state_dict().items():
        is_untouched &= bool((tensor == before[name]).all())
    return record, said, is_untouched


def by_definition(config: RunConfig, held_out: MadeUp) -> tuple[dict[str, float], float, int]:
    """Bits per byte of each language's text, loss and number of all labels, one token at a time in float64."""
    model = Transformer(config.model)
    initialize(model, seed=config.seed)
    sizes = token_bytes().tolist()
    bits_per_byte, nats, num_labels = {}, 0.0, 0
    for language in held_out.languages:
        bits, num_bytes = 0.0, 0
        for row in range(held_out.num_sequences(language)):
            batch = held_out.batch(language, range(row, row + 1))
            with torch.no_grad():
                logits = model(batch.tokens, Documents(batch.document_lengths, SEQ_LEN)).result[0].double()
            probabilities = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
            for position, label in enumerate(batch.labels[0].tolist()):
                if label == IGNORED:
                    continue
                probability = probabilities[position, label].item()
                nats -= math.log(probability)
                num_labels += 1
                if label >= NUM_SPECIAL:
                    bits -= math.log2(probability)
                    num_bytes += sizes[label]
        bits_per_byte[language] = bits / num_bytes
    return bits_per_byte, nats / num_labels, num_labels


@pytest.mark.parametrize("mesh", MESHES)
def test_bits_per_byte_equal_a_plain_loop_on_any_mesh(mesh: str) -> None:
    """Nine sequences do not divide over two or four ranks, and most ranks end with none."""
    num_ranks, changes = MESHES[mesh]
    config = tiny_config(train__microbatch_sequences=2, **changes)
    bits_per_byte, loss, num_labels = by_definition(config, HELD_OUT)
    reports = run_ranks(num_ranks, score, config, HELD_OUT)
    for record, said, is_untouched in reports:
        assert dict(record.bits_per_byte) == pytest.approx(bits_per_byte, rel=1e-5)
        assert record.mean_bits_per_byte == pytest.approx(sum(bits_per_byte.values()) / 3, rel=1e-5)
        assert record.loss == pytest.approx(loss, rel=1e-5)
        assert (record.step, record.tokens) == (12, num_labels)
        assert is_untouched
        most = -(-9 // num_ranks)
        assert said[-1] == f"validating {most}/{most}"
    assert len({record.loss for record, _, _ in reports}) == 1


def test_fewer_sequences_than_ranks() -> None:
    config, held_out = tiny_config(parallel__ep=4), MadeUp({"mt": 1, "xx": 1})
    bits_per_byte, loss, num_labels = by_definition(config, held_out)
    for record, _, _ in run_ranks(4, score, config, held_out):
        assert dict(record.bits_per_byte) == pytest.approx(bits_per_byte, rel=1e-5)
        assert (record.loss, record.tokens) == (pytest.approx(loss, rel=1e-5), num_labels)


def test_no_held_out_text() -> None:
    record, said, _ = run_ranks(1, score, tiny_config(), MadeUp({}))[0]
    assert (dict(record.bits_per_byte), record.tokens, said) == ({}, 0, [])
