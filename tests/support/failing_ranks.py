"""Runs each way to fail on two real ranks and prints, as JSON, what each rank said and left with.

A program of its own: it imports torch once and forks the ranks while it is still clean.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from amalthea.core.errors import AmaltheaError, ConfigError, DataError, TrainingError
from amalthea.core.world import World
from amalthea.launch.failure import on_main_rank, run_together
from amalthea.launch.world import discover, process_group


def _fail_with(error: Exception) -> int:
    raise error


def one_rank_fails(world: World) -> int:
    if world.rank == 1:
        _fail_with(ConfigError("broken in one place", "and in another"))
    dist.barrier()
    return 0


def all_ranks_fail_alike(world: World) -> int:
    dist.barrier()
    return _fail_with(TrainingError("the loss is not finite"))


def main_rank_fails_alone(world: World) -> int:
    on_main_rank(lambda: _fail_with(DataError("the corpus is empty")), world=world)
    return 0


def a_rank_is_killed(world: World) -> int:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return 0


def the_disk_is_full(world: World) -> int:
    if world.rank == 1:
        _fail_with(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    dist.barrier()
    return 0


def a_fault_of_ours(world: World) -> int:
    if world.rank == 1:
        _fail_with(ZeroDivisionError("ours"))
    dist.barrier()
    return 0


def nothing_fails(world: World) -> int:
    shared = on_main_rank(lambda: {"from": world.rank, "pid": os.getpid()}, world=world)
    return 0 if shared["from"] == 0 else 9


WAYS: dict[str, Callable[[World], int]] = {
    way.__name__: way
    for way in (
        one_rank_fails,
        all_ranks_fail_alike,
        main_rank_fails_alone,
        a_rank_is_killed,
        the_disk_is_full,
        a_fault_of_ours,
        nothing_fails,
    )
}


def _rank_main(way: Callable[[World], int]) -> int:
    """What the command line does around a run."""
    try:
        world = discover(device="cpu")
        with process_group(world) as store:
            return run_together(lambda: way(world), world=world, store=store, run_dir=Path("runs"))
    except AmaltheaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1


def _fork_rank(way: Callable[[World], int], rank: int, log: Path) -> int:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        code = _rank_main(way)
        sys.stderr.flush()
        os._exit(code)
    return pid


def _try(way: Callable[[World], int], folder: Path) -> list[dict[str, object]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    logs = [folder / f"{way.__name__}_{rank}.log" for rank in range(2)]
    pids = [_fork_rank(way, rank, log) for rank, log in enumerate(logs)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return [{"code": code, "said": log.read_text()} for code, log in zip(codes, logs, strict=True)]


def main() -> None:
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({name: _try(way, Path(folder)) for name, way in WAYS.items()}))


if __name__ == "__main__":
    main()
