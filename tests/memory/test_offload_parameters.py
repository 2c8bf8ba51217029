"""Parameters and gradients in host memory: the same steps and checkpoints, bit for bit, and copies for every use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import Outcome, microbatches, resumed, same, steps, tiny_config, uninterrupted, whole_state

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError, TrainingError
from amalthea.core.world import World
from amalthea.memory import state
from amalthea.memory.copies import Copies
from amalthea.memory.state import HostState
from amalthea.model.transformer import Transformer
from amalthea.optim import resting
from amalthea.parallel.fsdp import allocate
from amalthea.train.build import build
from amalthea.train.step import forward

from .stressed import ForgetsToWait, StressedCopies
from .watched import GuardedCopies, GuardsHost

MUON: dict[str, Any] = {"optim__experts": "muon", "optim__matrices": "muon"}
REPLICAS: dict[str, Any] = {"parallel__dp_replicate": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw": (1, {}),
    "muon, k=2, clip": (
        1,
        {
            **MUON,
            "train__microbatch_sequences": 1,
            "memory__sequences_per_gather": 2,
            "optim__qk_clip": 0.5,
            "model__qk_norm": False,
        },
    ),
    "muon, bf16, accumulating": (
        2,
        {
            **MUON,
            "precision": "bf16",
            "optim__muon__momentum_dtype": "bf16",
            "train__microbatch_sequences": 1,
            "model__tie_embeddings": True,
        },
    ),
    "muon, ep2": (4, {**MUON, "parallel__ep": 2}),
    "muon, owning, ep2": (4, {**MUON, **REPLICAS, "parallel__ep": 2}),
    "adamw, repeated": (4, {**REPLICAS, "optim__replicas": "repeated"}),
}
ENGINES = (None, "guarded", "random", "latest")
"""Who copies; every other time optimizer state rests too. With several ranks the second and the last."""


def config_of(settings: dict[str, Any], *, parameters: bool, state: bool = False) -> RunConfig:
    offload = {"memory__offload_parameters": parameters, "memory__offload_optimizer": state}
    # Every step is clipped, so that what scales gradients is seen.
    return tiny_config(train__max_grad_norm=0.01, **offload, **settings)


def engine_of(name: str | None, rank: int) -> Copies | None:
    match name:
        case None:
            return None
        case "guarded":
            return GuardedCopies()
        case "to_host" | "to_device":
            return ForgetsToWait(lane=name, host_is_kept=True)
        case _:
            return StressedCopies(seed=rank, max_delay_s=None if name == "latest" else 0.002, host_is_kept=True)


def three_steps(world: World, config: RunConfig, engine: str | None) -> Outcome:
    """Norms and weights, where buckets are small, so that several travel."""
    copies = engine_of(engine, world.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resting, "BUCKET_ELEMENTS", 2000)
        run = build(config, resolve(config, world_size=world.size), world, copies=copies)
        if isinstance(copies, GuardedCopies):
            with GuardsHost(run, copies) as guard:
                norms = steps(run, range(3))
            assert guard.num_operations > 100
            assert copies.num_on_device == 0, "between steps the device is the model's"
        else:
            norms = steps(run, range(3))
    if isinstance(copies, StressedCopies):
        copies.close()
        assert copies.num_copies > 100
    with torch.no_grad():
        losses = forward(run, microbatches(run, 3)[0], per_token=True).result
    return [*norms, *losses.flatten().tolist()], whole_state(run)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_same_bit_for_bit(case: str) -> None:
    num_ranks, settings = CASES[case]
    plain = run_ranks(num_ranks, three_steps, config_of(settings, parameters=False), None)
    for number, engine in enumerate(ENGINES if num_ranks == 1 else ENGINES[1::2]):
        config = config_of(settings, parameters=True, state=number % 2 == 1)
        late = run_ranks(num_ranks, three_steps, config, engine)
        assert all(map(same, late, plain)), engine


def seen(world: World, case: str, engine: str) -> bool:
    """Whether a run with something wrong was another than the plain one, or failed."""
    settings = CASES[case][1]
    plain = three_steps(world, config_of(settings, parameters=False), None)
    try:
        late = three_steps(world, config_of(settings, parameters=True, state=True), engine)
    except (TrainingError, AssertionError):  # not finite, or an operation on what rests
        return True
    return not same(late, plain)


@pytest.mark.parametrize("forgotten", ["to_host", "to_device"])
def test_a_missing_wait_is_seen(forgotten: str) -> None:
    assert run_ranks(1, seen, "adamw", forgotten) == [True]


def seen_of_mutant(world: World, case: str, name: str) -> bool:
    target, replacement, engine = MUTANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, replacement)
        return seen(world, case, engine)


def in_place(self: HostState, find: Any, **changes: bool) -> state.Resting:
    return state.Resting(find, rests=False)


MUTANTS: dict[str, tuple[str, Any, str]] = {
    "weights are gathered before they are back": ("amalthea.memory.state.HostState.land", lambda self: None, "latest"),
    "gradients do not travel": ("amalthea.memory.state.HostState.gradients", in_place, "guarded"),
    "weights do not travel": ("amalthea.memory.state.HostState.parameters", in_place, "guarded"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_seen(mutant: str) -> None:
    assert run_ranks(1, seen_of_mutant, "adamw", mutant) == [True]


@pytest.mark.parametrize("case", ["adamw", "muon, owning, ep2"])
def test_a_checkpoint_is_read_with_and_without_the_switch(case: str, tmp_path: Path) -> None:
    num_ranks, settings = CASES[case]
    plain = run_ranks(num_ranks, uninterrupted, config_of(settings, parameters=False))[0]
    for switches in ((True, False), (False, True), (True, True))[: 3 if num_ranks == 1 else 2]:
        folder = str(tmp_path / f"{switches}")
        before, after = (config_of(settings, parameters=parameters) for parameters in switches)
        assert same(run_ranks(num_ranks, resumed, folder, before, after)[0], plain), switches


def changed_and_read(forgets: bool) -> list[float]:
    """Two steps of: change all of a memory, read a half of it; what was read."""
    copies = StressedCopies(seed=0, max_delay_s=None, host_is_kept=True)
    host = HostState(copies, device=torch.device("cpu"), host_bytes=0, parameters=True)
    memory, read = torch.zeros(4), []
    change, look = host.parameters(lambda: [memory[:3]]), host.gradients(lambda: [memory[2:]])
    with pytest.MonkeyPatch.context() as patch:
        if forgets:
            patch.setattr(state, "_changes_any", lambda *args: False)
        for _ in range(2):
            with host.at_hand(change) as ((here,),):
                here += 1
            with host.at_hand(look) as ((here,),):
                read += here.tolist()
    host.settle()
    copies.close()
    return read


def test_nothing_comes_ahead_of_its_change() -> None:
    assert changed_and_read(forgets=False) == [1.0, 0.0, 2.0, 0.0]
    assert changed_and_read(forgets=True) != [1.0, 0.0, 2.0, 0.0]


def test_what_came_in_vain_is_let_go_and_comes_again() -> None:
    copies = GuardedCopies()
    host = HostState(copies, device=torch.device("cpu"), host_bytes=0, parameters=True)
    memories = [torch.zeros(1) for _ in range(3)]
    first, second, third = (host.parameters(lambda memory=memory: [memory]) for memory in memories)
    for order in ((first, second, third), (first, third)):
        for group in order:
            with host.at_hand(group) as ((here,),):
                here += 1
    host.settle()
    assert [memory.item() for memory in memories] == [2.0, 1.0, 2.0]
    del here
    assert copies.num_on_device == 0


def built_with(world: World, host_bytes: int) -> str:
    config = config_of({}, parameters=True)
    try:
        build(config, resolve(config, world_size=world.size), world, host_bytes=host_bytes)
    except ConfigError as error:
        return str(error)
    return "built"


def test_more_than_the_host_has_is_refused() -> None:
    with torch.device("meta"):
        model = Transformer(config_of({}, parameters=True).model)
    needed = 2 * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert run_ranks(1, built_with, needed) == ["built"]
    line = run_ranks(1, built_with, needed - 1)[0]
    assert line.startswith("memory.offload_parameters needs ")
    assert line.endswith("lower memory.offload_budget_gib, or take more ranks")


def test_buffers_are_on_the_device_whatever_parameters_are() -> None:
    with torch.device("meta"):
        model = Transformer(config_of({}, parameters=True).model)
    allocate(model, torch.device("meta"), rest_on_host=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert len(list(model.buffers())) == 2 + len(model.moe_layers())
