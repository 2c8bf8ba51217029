"""What selective recompute runs again, and what it does not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.models import small_batch, small_model, small_model_config
from support.ranks import run_ranks
from support.tiny import microbatches, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.world import World
from amalthea.memory.config import Kept, MemoryConfig
from amalthea.memory.recompute import apply_recompute
from amalthea.memory.tracker import StorageTracker
from amalthea.train.build import build
from amalthea.train.step import train_step

ATTENTION, EXPERTS = "aten._scaled_dot_product_flash_attention_for_cpu", "aten._grouped_mm"


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func).removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


def one_pass(keep: tuple[Kept, ...] | None) -> tuple[Counter[str], dict[str, torch.Tensor], int]:
    """Operations and gradients of one forward and backward, and bytes alive between them. None: no recompute."""
    config = small_model_config()
    model = small_model(config)
    if keep is not None:
        apply_recompute(model, keep=keep)
    tokens, documents, labels = small_batch(config)
    with StorageTracker() as tracker, Calls() as calls:
        loss = model(tokens, documents, labels).result
        kept_bytes = tracker.live_bytes
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return calls.names, grads, kept_bytes


@pytest.mark.parametrize(
    ("keep", "attention_runs", "expert_runs"),
    [(None, 1, 1), ((), 2, 2), (("attention",), 1, 2), (("experts",), 2, 1), (("attention", "experts"), 1, 1)],
)
def test_what_is_kept_does_not_run_again(keep: tuple[Kept, ...] | None, attention_runs: int, expert_runs: int) -> None:
    names, grads, _ = one_pass(keep)
    _, expected, _ = one_pass(None)
    layers = small_model_config().num_layers
    per_run = names[ATTENTION] // attention_runs
    assert per_run * attention_runs == names[ATTENTION] > 0
    # Three products forward, twice as many in backward; the last one's output is wanted by nobody a second time.
    assert names[EXPERTS] == layers * 9 + layers * 2 * (expert_runs - 1)
    assert [name for name in expected if not torch.equal(grads[name], expected[name])] == []


def test_kept_bytes_lie_between_nothing_and_everything() -> None:
    kept = [one_pass(keep)[2] for keep in ((), ("attention",), ("attention", "projections"), None)]
    assert kept == sorted(kept)
    assert len(set(kept)) == 4


def all_to_alls(world: World, config: RunConfig) -> int:
    run = build(config, resolve(config, world_size=world.size), world)
    with Calls() as calls:
        train_step(run, microbatches(run, 0), lr_factor=1.0, tallies=())
    return calls.names["c10d.alltoall_base_"]


def test_with_all_to_alls_kept_tokens_travel_as_often_as_without_recompute() -> None:
    def count(**memory: Any) -> int:
        return run_ranks(2, all_to_alls, tiny_config(parallel__ep=2, **memory))[0]

    plain, block = count(), count(memory__recompute="block")
    assert plain == 7 * 2, "in each layer: counts, rows, weights and rows back, and three of them in backward"
    assert block == plain + 3 * 2, "results do not come back a second time"
    assert count(memory__recompute="block", memory__blocks_per_group=2) == plain + 3 + 4, "the first layer's do"
    assert count(memory__recompute="selective") == plain
    assert count(memory__recompute="selective", memory__keep=("all_to_all",)) == plain
    assert count(memory__recompute="selective", memory__keep=("attention",)) == block


def test_selective_needs_something_to_keep() -> None:
    with pytest.raises(ValueError, match="name one or set recompute=block"):
        MemoryConfig(recompute="selective", keep=())
