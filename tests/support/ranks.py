"""Multi-rank tests in real gloo processes that are forked once and reused.

    def sums(world: World, value: int) -> float:              # module level, in a test file
        total = torch.tensor(float(world.rank + value))
        dist.all_reduce(total)
        return total.item()

    def test_sums():
        assert run_ranks(4, sums, 1) == [10.0] * 4

Nouns. A *pool* is one set of worker processes that share a default process group; there is one pool per
number of ranks, kept for the whole session, so a task costs milliseconds. The *zygote* is the process that
workers are forked from: it is forked itself after collection and before the first test (see `conftest.py`),
so it knows every test module but has run no backward, started no thread and touched no device, all of
which would break its children. A *task* is one call of `run_ranks`.

Between tasks a worker keeps nothing on purpose: process groups other than the default one are destroyed
(do not keep a DeviceMesh in a global) and the seed is 0 again. After a failure of any kind the pool is
killed; the next task gets a new one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import inspect
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from amalthea.core.world import World

_GRACE_S = 1.0
"""How long the other ranks may take to report too, once one has failed."""


class RankError(AssertionError):
    """A rank raised, died or hung; `failures` maps each such rank to its traceback or last words."""

    def __init__(self, task: str, failures: dict[int, str]) -> None:
        self.failures = failures
        parts = [f"rank {rank} of {task}: {text}" for rank, text in sorted(failures.items())]
        super().__init__("\n\n".join(parts))


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run `function(world, *args)` on every rank of a gloo process group and return the results by rank.

    `function` is at module level; arguments and results travel by pickle, so tensors by value (return
    `full_tensor()` or `to_local()` of a DTensor). Torch uses one thread. What a rank prints is shown only
    when it fails.

    Raises:
        RankError: A rank raised (with its traceback), died (with its last output) or was still busy after
            `timeout_s` (with the place where it was).
    """
    pool = _pools.get(num_ranks)
    if pool is None:
        pool = _pools[num_ranks] = _Pool.fork(num_ranks)
    try:
        return pool.run(function, args, timeout_s)
    except BaseException:
        del _pools[num_ranks]
        pool.kill()
        raise


@dataclass
class _Pool:
    """The parent's view of one set of workers."""

    folder: Path
    connections: list[Connection]
    pids: list[int] = field(default_factory=list)

    @classmethod
    def fork(cls, num_ranks: int) -> _Pool:
        zygote = _Zygote.get()
        folder = Path(tempfile.mkdtemp(prefix=f"pool{num_ranks}_", dir=zygote.folder))
        zygote.connection.send((num_ranks, folder))
        callers = [zygote.listener.accept() for _ in range(num_ranks)]
        arrived = sorted(((caller.recv(), caller) for caller in callers), key=lambda pair: pair[0])
        return cls(folder, [caller for _, caller in arrived], [pid for (_, pid), _ in arrived])

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        address = (function.__module__, inspect.getfile(function), function.__qualname__)
        task = pickle.dumps((address, pickle.dumps(args)))
        for connection in self.connections:
            connection.send_bytes(task)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while waiting := self._waiting(results, failures):
            ready = wait([self.connections[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in waiting:
                if self.connections[rank] in ready:
                    self._receive(rank, results, failures)
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not failures:
            failures |= {rank: self._hung(rank, timeout_s) for rank in waiting}
        if failures:
            raise RankError(f"{len(self.pids)} in {function.__qualname__}", failures)
        return [results[rank] for rank in range(len(self.pids))]

    def _waiting(self, results: dict[int, Any], failures: dict[int, str]) -> list[int]:
        return [rank for rank in range(len(self.pids)) if rank not in results and rank not in failures]

    def _receive(self, rank: int, results: dict[int, Any], failures: dict[int, str]) -> None:
        try:
            succeeded, value = pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            failures[rank] = f"the process died.\n{self._output(rank)}"
            return
        if succeeded:
            results[rank] = value
        else:
            failures[rank] = f"{value}\n{self._output(rank)}"

    def _hung(self, rank: int, timeout_s: float) -> str:
        """End a busy rank by SIGABRT, at which faulthandler writes down where it was."""
        _signal(self.pids[rank], signal.SIGABRT)
        wait([self.connections[rank]], timeout=5)
        return f"no result after {timeout_s:g} s.\n{self._output(rank)}"

    def _output(self, rank: int) -> str:
        return (self.folder / f"rank_{rank}.log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        for pid in self.pids:
            _signal(pid, signal.SIGKILL)
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_pools: dict[int, _Pool] = {}


@dataclass
class _Zygote:
    """The process that workers are forked from, and where they call back."""

    folder: Path
    listener: Listener
    connection: Connection
    _instance = None

    @classmethod
    def get(cls) -> _Zygote:
        """The one of this session, forked on the first call."""
        if cls._instance is None:
            _import_what_workers_need()
            folder = Path(tempfile.mkdtemp(prefix="ranks_"))
            listener = Listener(str(folder / "socket"), family="AF_UNIX", backlog=16)
            sys.stdout.flush()
            sys.stderr.flush()
            if os.fork() == 0:
                listener._listener._socket.close()  # type: ignore[attr-defined]  # keeps the socket's file
                _child(_zygote_main, folder)
            cls._instance = cls(folder, listener, listener.accept())
        return cls._instance


def start() -> None:
    """Fork the zygote now: call it before anything starts threads, runs backward or uses a device."""
    _Zygote.get()


def stop() -> None:
    """Kill the pools and end the zygote; safe to call when nothing was started."""
    for num_ranks in list(_pools):
        _pools.pop(num_ranks).kill()
    zygote, _Zygote._instance = _Zygote._instance, None
    if zygote is not None:
        zygote.connection.close()
        zygote.listener.close()
        shutil.rmtree(zygote.folder, ignore_errors=True)


def _import_what_workers_need() -> None:
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401


def _child(main: Callable[..., None], *args: Any) -> None:
    """Run `main` in a forked process and leave without the parent's exit handlers."""
    code = 1
    try:
        main(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _zygote_main(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends: it closes the connection
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are reaped by the system
    gc.freeze()  # workers collect what a task leaves, never the thousands of objects of the imports
    connection = Client(str(folder / "socket"))
    while True:
        try:
            num_ranks, pool_folder = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        for rank in range(num_ranks):
            if os.fork() == 0:
                connection.close()
                _child(_worker_main, folder, pool_folder, rank, num_ranks)


def _worker_main(folder: Path, pool_folder: Path, rank: int, num_ranks: int) -> None:
    import torch
    import torch.distributed as dist

    log = os.open(pool_folder / f"rank_{rank}.log", os.O_CREAT | os.O_RDWR | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    connection = Client(str(folder / "socket"))
    connection.send((rank, os.getpid()))
    store = dist.FileStore(str(pool_folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(minutes=5))
    world = World(rank=rank, size=num_ranks, local_rank=rank, device="cpu")
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        os.ftruncate(log, 0)
        torch.manual_seed(0)
        try:
            reply = pickle.dumps((True, _call(task, world)))
        except BaseException:
            connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
            continue  # the parent kills this pool
        connection.send_bytes(reply)
        _forget_groups()


def _call(task: bytes, world: World) -> Any:
    (module_name, path, qualname), args = pickle.loads(task)
    function: Any = _module(module_name, path)
    for name in qualname.split("."):
        function = getattr(function, name)
    return function(world, *pickle.loads(args))


def _module(name: str, path: str) -> ModuleType:
    """The module as the parent knows it; loaded from its file where it is newer than the zygote."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _forget_groups() -> None:
    """Destroy every process group but the default one, once all ranks are done with them.

    DTensor caches placements with their mesh, and equal meshes of the next task would find the dead groups there.
    """
    import torch.distributed as dist
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.barrier()
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    gc.collect()
    default = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not default:
            dist.destroy_process_group(group)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
