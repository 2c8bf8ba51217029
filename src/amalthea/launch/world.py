"""How a process learns its place: from torchrun, from Slurm's `srun`, or alone. Reads the environment.

Nouns. A *launcher* started the processes and tells each its rank. The *rendezvous* is the address and port at
which they find each other. A process that can't be sure of either refuses to start: one that guessed would
wait for ranks that never come, or train a model of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from amalthea.core.errors import ConfigError
from amalthea.core.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

Launcher = Literal["single", "torchrun", "slurm"]
Environment = Mapping[str, str]

MEETING_TIME = timedelta(minutes=30)
"""How long ranks wait for each other to start, and in a collective."""
LEAVING_S = 3.0
"""How long rank 0 waits for the others at the end."""


@dataclass(frozen=True)
class Place:
    """What the launcher said."""

    launcher: Launcher
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def discover(*, device: Literal["auto", "cpu", "cuda"] = "auto", environ: Environment = os.environ) -> World:
    """This process among all of the run; `auto` takes CUDA where there is a GPU.

    Raises:
        ConfigError: the launcher's variables are missing in part or contradict each other or Slurm, `cuda` is
            asked for and absent, or the node has fewer GPUs than processes.
    """
    place = find_place(environ)
    return World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        device=_choose_device(device, place),
    )


def find_place(environ: Environment = os.environ) -> Place:
    """Rank and size as the launcher gave them: torchrun's variables first, then Slurm's, then alone.

    Raises:
        ConfigError: as `discover`, devices left out.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        place = _torchrun_place(environ)
        _check_against_slurm(place, environ)
    elif _number("SLURM_NTASKS", environ, default=1) > 1 and "SLURM_PROCID" in environ:
        place = _slurm_place(environ)
    else:
        return Place("single")
    for name, index, count in (("rank", place.rank, place.size), ("local rank", place.local_rank, place.local_size)):
        if index >= count:
            raise ConfigError(f"{place.launcher} gave {name} {index} of {count}; expected 0 to {count - 1}")
    return place


def is_main_process(environ: Environment = os.environ) -> bool:
    """Whether this is rank 0, as far as the environment says; used to say one thing once."""
    return environ.get("RANK", environ.get("SLURM_PROCID", "0")) == "0"


@contextmanager
def process_group(world: World, *, environ: Environment = os.environ) -> Iterator[Store]:
    """Join the default process group for the time of the block; yields a store that all ranks share.

    One process alone has a group too, so training has one path. Sets this process's GPU, and its threads where
    several processes share a node.

    Raises:
        ConfigError: under Slurm, the address to meet at cannot be found out.

    Communication: gloo on CPU; on CUDA gloo for CPU tensors and NCCL for the others.
    """
    import torch
    import torch.distributed as dist

    store = _open_store(world, environ)
    share_threads(world, environ=environ)
    if world.device == "cuda":
        torch.cuda.set_device(world.local_rank)
    backend = "gloo" if world.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("process_group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=MEETING_TIME,
    )
    shared = dist.PrefixStore("launch", store)
    failed = True
    try:
        yield shared
        failed = False
    finally:
        # NCCL's orderly end waits for the other ranks, which may never answer; leaving the process ends it.
        if world.device == "cpu" or not failed:
            dist.destroy_process_group()
        _leave(shared, world)


def share_threads(world: World, *, environ: Environment = os.environ) -> int | None:
    """Divide a node's cores among its processes, unless OMP_NUM_THREADS says otherwise; returns the number set.

    Without it every process takes every core, and they hinder each other many times over.
    """
    import torch

    threads = _share(world.local_size, environ)
    if threads is not None:
        torch.set_num_threads(threads)
    return threads


def threads_of_ranks(local_size: int, *, environ: Environment = os.environ) -> int | None:
    """Threads that each of `local_size` ranks would have that were started from here on this node.

    None where they would have torch's own choice: one rank alone, or OMP_NUM_THREADS, which processes inherit. In a
    Slurm job `srun` starts them, else `torchrun`, which sets OMP_NUM_THREADS to 1 where it is not set.
    """
    if local_size > 1 and "OMP_NUM_THREADS" not in environ and "SLURM_JOB_ID" not in environ:
        return 1
    return _share(local_size, environ)


def _share(local_size: int, environ: Environment) -> int | None:
    if local_size == 1 or "OMP_NUM_THREADS" in environ:
        return None
    if "SLURM_CPUS_PER_TASK" in environ:
        return _number("SLURM_CPUS_PER_TASK", environ)
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def slurm_rendezvous(environ: Environment) -> tuple[str, int]:
    """Address of the job's first node, and a port made of the job id, so that two jobs on a node don't meet.

    MASTER_ADDR and MASTER_PORT win where they are set. On machines whose node names with an `i` appended stand
    for the fast interface, set MASTER_ADDR to that.

    Raises:
        ConfigError: MASTER_ADDR is not set and `scontrol` cannot tell the first node. Never falls back on
            localhost: every node would then be its own master.
    """
    port = _number("MASTER_PORT", environ, default=20_000 + _number("SLURM_JOB_ID", environ, default=0) % 20_000)
    if address := environ.get("MASTER_ADDR"):
        return address, port
    mend = "set MASTER_ADDR to the name of the job's first node"
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise ConfigError(f"MASTER_ADDR and SLURM_JOB_NODELIST are not set, so the ranks cannot meet; {mend}")
    try:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60, env=dict(environ)
        )
    except FileNotFoundError:
        raise ConfigError(
            f"MASTER_ADDR is not set and scontrol is not here to tell the first node of {nodes} (containers "
            f"often lack it); {mend}"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"scontrol cannot tell the first node of {nodes} ({error}); {mend}") from None
    if answer.returncode or not answer.stdout.split():
        reason = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        raise ConfigError(f"scontrol cannot tell the first node of {nodes} ({reason}); {mend}")
    return answer.stdout.split()[0], port


def _torchrun_place(environ: Environment) -> Place:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environ]
    if missing:
        present = ", ".join(name for name in needed if name in environ)
        raise ConfigError(
            f"{present} set but {', '.join(missing)} not; start with torchrun or srun, "
            f"or set all of {', '.join(needed)}"
        )
    rank, size = _number("RANK", environ), _number("WORLD_SIZE", environ)
    return Place(
        launcher="torchrun",
        rank=rank,
        size=size,
        local_rank=_number("LOCAL_RANK", environ, default=rank),
        local_size=_number("LOCAL_WORLD_SIZE", environ, default=size),
    )


def _slurm_place(environ: Environment) -> Place:
    size = _number("SLURM_NTASKS", environ)
    if "SLURM_STEP_ID" not in environ and "SLURM_STEPID" not in environ:
        raise ConfigError(
            f"this Slurm job has {size} tasks, but this process was not started by srun and would wait for the "
            f"others for ever; put srun before the command (srun -n 1 for a single process)"
        )
    return Place(
        launcher="slurm",
        rank=_number("SLURM_PROCID", environ),
        size=size,
        local_rank=_number("SLURM_LOCALID", environ),
        local_size=_slurm_local_size(environ, size),
    )


def _slurm_local_size(environ: Environment, size: int) -> int:
    """Tasks on this node, from a list such as `4(x2),1` and the node's index."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", str(size))
    counts: list[int] = []
    for count, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(repeated or 1)
    node = _number("SLURM_NODEID", environ, default=0)
    return counts[node] if node < len(counts) else size


def _check_against_slurm(place: Place, environ: Environment) -> None:
    """Under srun, WORLD_SIZE must count every task: a smaller one makes several worlds of one job."""
    if "SLURM_STEP_ID" not in environ and "SLURM_STEPID" not in environ:
        return
    tasks = _number("SLURM_NTASKS", environ, default=1)
    # A task is either a rank of its own, or a torchrun that starts LOCAL_WORLD_SIZE ranks.
    per_task = place.local_size if "TORCHELASTIC_RUN_ID" in environ else 1
    if place.size != tasks * per_task:
        raise ConfigError(
            f"WORLD_SIZE is {place.size}, but srun started {tasks} tasks of {per_task} ranks; expected "
            f"{tasks * per_task}: unset RANK and WORLD_SIZE to use Slurm's, or give torchrun --nnodes and "
            f"--rdzv-endpoint"
        )


def _open_store(world: World, environ: Environment) -> Store:
    import torch.distributed as dist

    if world.size == 1:
        return dist.HashStore()
    if find_place(environ).launcher == "torchrun":
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=MEETING_TIME))
        return store
    address, port = slurm_rendezvous(environ)
    try:
        return dist.TCPStore(address, port, world.size, is_master=world.is_main, timeout=MEETING_TIME)
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"rank {world.rank} cannot meet the others at {address}:{port} ({reason})") from error


def _leave(store: Store, world: World) -> None:
    """Rank 0 may hold the store: it leaves last, so that ranks that it cut off can still look there."""
    import torch.distributed as dist

    if world.size == 1:
        return
    with suppress(dist.DistError, RuntimeError):
        if store.add("left", 1) == world.size:
            store.set("all_left", "")
        deadline = time.monotonic() + LEAVING_S
        # Looked at again and again: torch writes a warning when a wait runs out.
        while world.is_main and not store.check(["all_left"]) and time.monotonic() < deadline:
            time.sleep(0.01)


def _choose_device(asked: Literal["auto", "cpu", "cuda"], place: Place) -> Literal["cpu", "cuda"]:
    if asked == "cpu":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        if asked == "cuda":
            raise ConfigError(
                f"device=cuda, but torch {torch.__version__} finds no GPU; use device=cpu, or check the driver and "
                f"that torch is a CUDA build"
            )
        return "cpu"
    num_gpus = torch.cuda.device_count()
    if place.local_rank >= num_gpus:
        raise ConfigError(
            f"local rank {place.local_rank} has no GPU: this process sees {num_gpus}; start at most {num_gpus} "
            f"processes per node and let each see all of the node's GPUs (no --gpus-per-task)"
        )
    return "cuda"


def _number(name: str, environ: Environment, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ConfigError(f"{name} is not set; start with torchrun or srun")
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name} is {text!r}; expected a whole number")
    return int(text)
