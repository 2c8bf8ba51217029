"""The tracker counts what lives, and nothing twice."""

from __future__ import annotations

import torch
from support.ranks import run_ranks
from support.tiny import microbatches, run_steps, tiny_config
from torch._subclasses import FakeTensorMode

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.tensors import local_tensor
from amalthea.core.world import World
from amalthea.memory.tracker import StorageTracker
from amalthea.train.build import build
from amalthea.train.step import train_step

KIB = 1024


def test_views_share_one_storage_until_the_last_is_gone() -> None:
    with StorageTracker() as tracker:
        whole = torch.empty(KIB, dtype=torch.uint8)
        views = [whole.view(32, 32), *whole.split(100)]
        assert tracker.live_bytes == KIB
        del whole
        assert tracker.live_bytes == KIB
        views.clear()
        assert tracker.live_bytes == 0
        assert tracker.peak_bytes == KIB
        tracker.reset_peak()
        assert tracker.peak_bytes == 0


def test_autograd_holds_what_backward_needs() -> None:
    weight = torch.randn(16, 16, requires_grad=True)
    with StorageTracker() as tracker:
        tracker.add(weight)
        hidden = weight.exp()
        loss = (hidden @ hidden).tanh().sum()
        del hidden
        # weight, exp and tanh, each saved by its own backward, and the loss; the product went to tanh and is gone.
        assert tracker.live_bytes == 3 * KIB + 4
        loss.backward()
        del loss
        assert tracker.live_bytes == 2 * KIB
        assert tracker.peak_bytes > 4 * KIB


def test_storages_are_followed_through_resize() -> None:
    with StorageTracker() as tracker:
        tensor = torch.empty(KIB, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        assert (tracker.live_bytes, tracker.holdings()) == (0, [])
        tensor.untyped_storage().resize_(2 * KIB)
        assert tracker.live_bytes == tracker.peak_bytes == 2 * KIB
    before = torch.UntypedStorage.resize_
    with StorageTracker():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before


def test_fake_tensors_weigh_what_they_stand_for() -> None:
    with FakeTensorMode(), StorageTracker() as tracker:
        left = torch.empty(1 << 20, 1 << 12)
        right = left + 1
        assert tracker.live_bytes == 2 << 34
        del left, right
        assert tracker.live_bytes == 0


def test_holdings_say_who_made_them() -> None:
    layer = torch.nn.Linear(8, 4, bias=False)
    with StorageTracker() as tracker:
        tracker.name_modules([("blocks.0.attn.wq", layer)])
        out = layer(torch.ones(16, 8))
        largest, product, weight = tracker.holdings()
    assert (largest.operation, largest.shape, largest.module) == ("aten.ones", (16, 8), "")
    assert (product.operation, product.shape, product.module) == ("aten.mm", (16, 4), "blocks.0.attn.wq")
    assert product.dtype == torch.float32
    assert out.shape == (16, 4)
    assert weight.shape == (8, 4), "first seen by a view"


def live_after_steps(world: World, config: RunConfig) -> tuple[int, int, list[float]]:
    """Tracked bytes after two steps; bytes of parameters and optimizer state; losses."""
    with StorageTracker() as tracker:
        run = build(config, resolve(config, world_size=world.size), world)
        built = tracker.live_bytes
        losses = [train_step(run, microbatches(run, s), lr_factor=1.0, tallies=()).loss for s in range(2)]
        after = tracker.live_bytes
    known = [*run.model.parameters(), *run.model.buffers(), *run.optimizers.named_state().values()]
    known_bytes = sum(local_tensor(t).untyped_storage().nbytes() for t in known)
    # All a step leaves behind is a few scalars.
    assert abs(after - built) < 100 * KIB
    return after, known_bytes, losses


def test_between_steps_a_run_holds_its_parameters_and_state_under_fsdp() -> None:
    config = tiny_config(model__num_layers=3, parallel__ep=2)
    plain = run_ranks(4, run_steps, config, 2)[0]
    for after, known_bytes, losses in run_ranks(4, live_after_steps, config):
        assert known_bytes <= after < known_bytes * 1.1 + 20 * KIB
        assert losses == plain.losses
