"""One command from start to exit code, the same alone, under torchrun and under srun."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, MutableMapping
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from amalthea.config.check import ResolvedRun, check_vocab, dispatch_node_ranks, resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.libc import keep_freed_memory
from amalthea.core.units import GIB
from amalthea.core.world import World
from amalthea.launch.failure import on_main_rank, run_together
from amalthea.launch.manifest import TOKENIZER_FILE, check_same_run, check_writable, write_manifest, write_whole
from amalthea.launch.paths import cache_dir
from amalthea.launch.signals import exit_code, listen
from amalthea.launch.world import discover, process_group

if TYPE_CHECKING:
    from amalthea.plan.start import Room

RUNS_FOLDER = Path("runs")


def run(
    config: RunConfig,
    *,
    run_dir: Path | None = None,
    say: Callable[[str], None] | None = None,
    finish: Callable[[Path], None] | None = None,
) -> int:
    """Train as `config` says, in `run_dir` or a new folder `runs/RECIPE-TIME`; every rank calls it together.

    On rank 0, `say` is told how the data is being prepared, and `finish` is called with the run folder once
    training has ended or was stopped. Returns the exit code: 0, or 75 / 130 where a signal stopped the run
    after it had saved, or another rank's code where that one failed.

    Raises:
        AmaltheaError: on one rank only, so that the message is printed once; contradictions of the launcher
            or the node (`discover`) on each rank that meets them.
    """
    world = discover(device=config.device)
    if world.device == "cpu":
        keep_freed_memory()
    else:
        expand_segments()
    try:
        resolved = resolve(config, world_size=world.size)
        check_memory(config, resolved, world)
        if world.is_main:
            check_step(config, world, say=say)
        set_up_attention(config, world)
    except ConfigError as error:
        if world.is_main:
            raise
        return error.exit_code
    with process_group(world) as store:
        return run_together(
            lambda: _run(config, resolved, world, run_dir=run_dir, say=say, finish=finish),
            world=world,
            store=store,
            run_dir=run_dir or RUNS_FOLDER,
        )


def check_memory(config: RunConfig, resolved: ResolvedRun, world: World) -> None:
    """Refuses a run whose state alone exceeds this rank's memory, before anything is prepared or built.

    On a CPU tensors are in host memory. Raises ConfigError, naming what is largest and what would fit.
    """
    from amalthea.memory.offload import host_bytes_of_rank
    from amalthea.plan.fits import check_fits

    host_bytes = device_bytes = host_bytes_of_rank(world)
    if world.device == "cuda":
        import torch

        device_bytes = torch.cuda.get_device_properties(world.local_rank).total_memory
    check_fits(config, resolved, device_bytes, host_bytes)


PLANNED_SHARE = 4
"""On a CPU a step is planned where its lower bound takes more than one part of so many of what there is."""


def check_step(config: RunConfig, world: World, *, say: Callable[[str], None] | None = None) -> None:
    """Refuses a step that does not fit into this rank's memory, by tracing it as `amalthea plan` does.

    In a process of its own, which leaves nothing behind. A step that cannot be traced is let pass, and `say` told.
    Raises ConfigError, naming the part of the step in which memory runs out and what would fit.
    """
    if not config.memory.plan_at_start:
        return
    from amalthea.plan.fits import memory_floor
    from amalthea.plan.setting import Code
    from amalthea.plan.start import refusal
    from amalthea.train.build import build
    from amalthea.train.step import train_step

    room = _room(world)
    bound = memory_floor(config, resolve(config, world_size=world.size)).device
    if not room.is_gpu and bound * PLANNED_SHARE < room.device_bytes:
        return
    tell = say or (lambda text: None)
    tell("planning memory")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(
            refusal,
            config,
            room,
            Code(build, train_step),
            world_size=world.size,
            node_ranks=min(world.local_size, world.size),
        )
        try:
            line = found.result()
        except Exception as error:
            # Whatever the plan's own trouble is, it must not stop a run that may be all right.
            tell(f"memory was not planned: {type(error).__name__}: {error}")
            return
    if line is not None:
        raise ConfigError(line)


def _room(world: World) -> Room:
    from amalthea.memory.offload import host_bytes_of_rank
    from amalthea.plan.devices import Reserves
    from amalthea.plan.start import Room

    host_bytes = host_bytes_of_rank(world)
    if world.device != "cuda":
        return Room(host_bytes, host_bytes, is_gpu=False)
    import torch

    total = torch.cuda.get_device_properties(world.local_rank).total_memory
    grows = "expandable_segments:True" in expand_segments()
    return Room(total - int(Reserves().device_gib * GIB), host_bytes, is_gpu=True, expandable_segments=grows)


def set_up_attention(config: RunConfig, world: World) -> None:
    """Sets this process's flash kernels up. Raises ConfigError where its device cannot have what was asked for."""
    from amalthea.kernels.flash import use_flash_attention

    use_flash_attention(flash_attention_of(config, world))


def flash_attention_of(config: RunConfig, world: World) -> Literal["torch", "fa3"]:
    """What this rank's device takes. Raises ConfigError where it cannot have what was asked for."""
    import torch

    from amalthea.kernels.flash import choose_flash_attention

    return choose_flash_attention(config.flash_attention, torch.device(world.torch_device))


def expand_segments(environ: MutableMapping[str, str] = os.environ) -> str:
    """Has CUDA's allocator grow its segments, unless the user has set it up; returns its setting.

    Before the first tensor on the device. Without it, blocks of the sizes that a step frees and needs again do not
    fit each other: the plan, which assumes it, says how much.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in environ:
            return environ[name]
    return environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def new_run_dir(recipe: str, *, now: datetime, parent: Path = RUNS_FOLDER) -> Path:
    """`runs/quickstart-20260131-235959`, with `-2` and so on appended where that is taken."""
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', recipe)}-{now:%Y%m%d-%H%M%S}"
    folder, count = parent / name, 1
    while folder.exists():
        count += 1
        folder = parent / f"{name}-{count}"
    return folder


def chosen_automatically(config: RunConfig, resolved: ResolvedRun, world: World) -> dict[str, Any]:
    """What each `auto` of the configuration became, and how many threads torch took."""
    import torch

    chosen: dict[str, Any] = {"torch_threads": torch.get_num_threads()}
    if config.device == "auto":
        chosen["device"] = world.device
    if world.device == "cuda":
        chosen["allocator"] = expand_segments()
        if config.flash_attention == "auto":
            chosen["flash_attention"] = flash_attention_of(config, world)
    if config.parallel.dp_shard == "auto":
        chosen["parallel.dp_shard"] = resolved.dp_shard
    if config.parallel.dispatch == "auto":
        by_node = dispatch_node_ranks(config, local_size=world.local_size) is not None
        chosen["parallel.dispatch"] = "hierarchical" if by_node else "flat"
    return chosen


def _run(
    config: RunConfig,
    resolved: ResolvedRun,
    world: World,
    *,
    run_dir: Path | None,
    say: Callable[[str], None] | None,
    finish: Callable[[Path], None] | None,
) -> int:
    from amalthea.data.dataset import mixture_of
    from amalthea.data.prepare import prepare
    from amalthea.data.prepared import TOKENIZER_FILE as PREPARED_TOKENIZER_FILE
    from amalthea.train.loop import train

    def open_folder() -> Path:
        # Before the corpus is prepared, which may take long.
        folder = run_dir or new_run_dir(config.recipe, now=datetime.now())
        check_writable(folder)
        check_same_run(folder, config)
        return folder

    folder = on_main_rank(open_folder, world=world)
    prepared = on_main_rank(lambda: prepare(config.data, cache_dir=cache_dir(), progress=say), world=world)
    check_vocab(config, tokenizer_vocab_size=prepared.vocab_size)
    mixture_of(prepared, config.data)  # what it refuses shall not leave a folder

    def write_folder() -> None:
        write_manifest(
            folder,
            config=config,
            resolved=resolved,
            world=world,
            chosen=chosen_automatically(config, resolved, world),
            data_checksum=prepared.checksum,
        )
        # A copy that outlives the cache.
        write_whole(folder / TOKENIZER_FILE, (prepared.path / PREPARED_TOKENIZER_FILE).read_text(encoding="utf-8"))

    on_main_rank(write_folder, world=world)
    with listen() as stop:
        result = train(config, resolved, world, prepared, run_dir=folder, stop_requested=stop.reason)

    if finish is not None:
        # Every rank stays until then: launchers end rank 0 when another one has left with a code that is not 0.
        on_main_rank(lambda: finish(folder), world=world)
    return exit_code(result.stopped)
