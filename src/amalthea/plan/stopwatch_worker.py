"""One of the processes behind `plan/stopwatch.py`: it is told what to measure and answers with seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # defines operators of traces
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from amalthea.core.libc import keep_freed_memory
from amalthea.core.world import World
from amalthea.kernels.attention import Documents
from amalthea.model.config import ModelConfig, MoEConfig
from amalthea.model.init import initialize
from amalthea.model.transformer import Transformer
from amalthea.parallel.fsdp import apply_fsdp
from amalthea.parallel.mesh import build_mesh
from amalthea.plan.events import Exchange
from amalthea.plan.trace.calls import Call, CallBook, materialize
from amalthea.plan.trace.costs import multiplies, operation

Work = Callable[[], object]
Device = Literal["cpu", "cuda"]
_LEAST_TRIES, _MOST_TRIES = 3, 200
_CACHE_BYTES = 8 << 20
"""More than the caches of one core hold, and less than those that cores share."""
_TINY = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_seq_len=16,
    moe=MoEConfig(num_experts=4, top_k=2, expert_hidden_size=8),
)
_WORK_SIDE, _LATE_TRIES, _MODEL_TRIES = 384, 60, 20


@dataclass(frozen=True)
class Host:
    """Which of the processes this is."""

    rank: int
    size: int
    store: str
    device: Device
    threads: int | None
    """None for torch's own choice."""


def serve(host: Host, connection: Connection) -> None:
    """Answers requests until the other end closes."""
    try:
        if host.threads is not None:
            torch.set_num_threads(host.threads)
        if host.device == "cpu":
            keep_freed_memory()  # as the launcher does
        worker = _Worker(host)
        connection.send([torch.get_num_threads()])
        while True:
            what, work, budget_s = connection.recv()
            connection.send(getattr(worker, what)(work, budget_s))
    except EOFError:
        return
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


@dataclass
class _Worker:
    host: Host
    groups: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = torch.device(f"cuda:{self.host.rank}" if self.host.device == "cuda" else "cpu")
        self.store = dist.FileStore(self.host.store, self.host.size)
        self.everyone = self._group(tuple(range(self.host.size)))
        self.elsewhere = torch.zeros(_CACHE_BYTES // 4, device=self.device)

    def kernels(self, calls: Sequence[Call], budget_s: float) -> list[float]:
        found = []
        for call in calls:
            try:
                found.append(self._kernel(call, budget_s))
            except (RuntimeError, TypeError, IndexError) as error:
                raise RuntimeError(f"{call}: {error}") from error
        return found

    def _kernel(self, call: Call, budget_s: float) -> float:
        """What multiplies uses its operands many times; anything else is as fast as they come, which in a step is
        from what cores share, not from the core's own caches."""
        ready = materialize(call, device=self.device)
        if multiplies(call.name):
            return self._seconds(ready.run, budget_s, between=ready.refill)

        def between() -> None:
            if ready.refill is not None:
                ready.refill()
            self.elsewhere.add_(1.0)

        return self._seconds(ready.run, budget_s, between=between)

    def exchanges(self, exchanges: Sequence[Exchange], budget_s: float) -> list[float]:
        found = []
        for exchange in exchanges:
            work = self._exchange(exchange)
            work()
            self._meet()
            # Every rank must send as often: tries are counted, not timed.
            found.append(self._mean(work, tries=10))
        return found

    def overhead(self, _: object, budget_s: float) -> list[float]:
        """A model that is nothing but overhead: the real one, so small that its operations take next to nothing."""
        step = _steps(self._tiny(), self.device)
        with _Calls() as seen:
            step()
        whole = self._seconds(step, 10 * budget_s)
        ready = [materialize(call, device=self.device) for call in seen.book.calls]
        each = [self._seconds(one.run, budget_s / 20) for one in ready]
        return [max(0.0, whole - sum(each[number] for number in seen.numbers)) / len(seen.numbers)]

    def gathering(self, _: object, budget_s: float) -> list[float]:
        """What FSDP2 costs for each of its collectives, beside them: the small model sharded, less the model alone."""
        host = self.host
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if host.device == "cuda" else "gloo"
            store = dist.PrefixStore("default", self.store)
            dist.init_process_group(backend, store=store, rank=host.rank, world_size=host.size)
        world = World(rank=host.rank, size=host.size, local_rank=host.rank, local_size=host.size, device=host.device)
        model = self._tiny()
        mesh = build_mesh(world, dp_replicate=1, dp_shard=host.size, ep=1)
        apply_fsdp(
            model,
            mesh,
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
            reshard_after_forward=True,
            reduce_over_replicas=False,
        )
        alone, sharded = _steps(self._tiny(), self.device), _steps(model, self.device)
        with _Calls() as seen:
            sharded()
        alone()
        self._meet()
        extra = self._mean(sharded, tries=_MODEL_TRIES)
        self._meet()
        extra -= self._mean(alone, tries=_MODEL_TRIES)
        self._meet()
        small = Exchange("all_gather", tuple(range(host.size)), 1024, 1024 * host.size)
        return [max(0.0, extra / seen.num_gathers - self._mean(self._exchange(small), tries=_LATE_TRIES))]

    def _tiny(self) -> Transformer:
        with torch.device("meta"):
            model = Transformer(_TINY)
        model.to_empty(device=self.device)
        initialize(model, seed=0)
        return model

    def lateness(self, _: object, budget_s: float) -> list[float]:
        """That a collective costs because ranks do not come to it at once, after the same work."""
        matrix, flag = torch.ones(_WORK_SIDE, _WORK_SIDE, device=self.device), torch.zeros(1, device=self.device)

        def compute() -> None:
            for _ in range(4):
                torch.mm(matrix, matrix)

        def meet() -> None:
            self.everyone.allreduce([flag]).wait()

        def both() -> None:
            compute()
            meet()

        compute()
        self._meet()
        together = self._mean(both, tries=_LATE_TRIES)
        computing = self._mean(compute, tries=_LATE_TRIES)
        self._meet()
        return [max(0.0, together - computing - self._mean(meet, tries=_LATE_TRIES))]

    def _exchange(self, exchange: Exchange) -> Work:
        start = self._starter(exchange, self._group(_mine(exchange.ranks, self.host)))
        return lambda: start().wait()

    def _starter(self, exchange: Exchange, group: Any) -> Callable[[], Any]:
        count = len(exchange.ranks)
        if exchange.kind == "all_gather":
            shard = self._floats(exchange.bytes_out)
            whole = shard.repeat(count)
            return lambda: group._allgather_base(whole, shard)
        if exchange.kind == "reduce_scatter":
            shard = self._floats(exchange.bytes_in)
            whole = shard.repeat(count)
            return lambda: group._reduce_scatter_base(shard, whole)
        if exchange.kind == "all_to_all":
            # An uneven one is measured as an even one of its larger side.
            sent = self._floats(-(-max(exchange.bytes_out, exchange.bytes_in) // count)).repeat(count)
            received = torch.empty_like(sent)
            return lambda: group.alltoall_base(received, sent, [], [])
        tensor, start = self._floats(exchange.bytes_out), getattr(group, exchange.kind.replace("_", ""))
        return lambda: start([tensor])

    def _floats(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(-(-num_bytes // 4), device=self.device)

    def _group(self, ranks: tuple[int, ...]) -> Any:
        if ranks not in self.groups:
            store = dist.PrefixStore(",".join(map(str, ranks)), self.store)
            mine, size = ranks.index(self.host.rank), len(ranks)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                self.groups[ranks] = dist.ProcessGroupNCCL(store, mine, size, dist.ProcessGroupNCCL.Options())
            else:
                gloo: Any = dist.ProcessGroupGloo  # its type stubs lack most of it
                options = gloo._Options()
                options._devices = [gloo.create_device(hostname="127.0.0.1")]
                self.groups[ranks] = gloo(store, mine, size, options)
        return self.groups[ranks]

    def _meet(self) -> None:
        self.everyone.allreduce([torch.zeros(1, device=self.device)]).wait()
        self._finish()

    def _seconds(self, work: Work, budget_s: float, *, between: Work | None = None) -> float:
        """Of one try, from as many as the budget allows; `between` tries something is done that does not count."""
        work()
        began = time.perf_counter()
        work()
        self._finish()
        once = time.perf_counter() - began
        if between is None:
            return self._mean(work, tries=min(_MOST_TRIES, max(_LEAST_TRIES, int(budget_s / max(once, 1e-6)))))
        seconds: list[float] = []
        stop = time.perf_counter() + budget_s
        while len(seconds) < _LEAST_TRIES or (time.perf_counter() < stop and len(seconds) < _MOST_TRIES):
            between()
            seconds.append(self._mean(work, tries=1))
        return sum(seconds) / len(seconds)

    def _mean(self, work: Work, *, tries: int) -> float:
        """The mean, not the best: where processes outnumber cores, waiting for one's turn is part of it."""
        self._finish()
        began = time.perf_counter()
        for _ in range(tries):
            work()
        self._finish()
        return (time.perf_counter() - began) / tries

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _mine(ranks: tuple[int, ...], host: Host) -> tuple[int, ...]:
    """The group like `ranks` that this process is in: the same ranks, moved."""
    covered: set[int] = set()
    for first in range(host.size):
        if first in covered:
            continue
        group = tuple(rank - ranks[0] + first for rank in ranks)
        if host.rank in group:
            return group
        covered.update(group)
    return ranks


def _steps(model: Transformer, device: torch.device) -> Work:
    """Forward and backward of a few tokens."""
    tokens = torch.zeros(1, _TINY.max_seq_len, dtype=torch.int64, device=device)
    documents = Documents.whole(*tokens.shape, device=device)
    return lambda: model(tokens, documents, tokens).result.backward()


class _Calls(TorchDispatchMode):
    """Keeps what is called, and counts gathers and reduce-scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.numbers, self.num_gathers = CallBook(), list[int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func.namespace == "c10d":
            self.num_gathers += func.name().partition("::")[2] in ("_allgather_base_", "_reduce_scatter_base_")
        elif operation(func).is_kernel:
            self.numbers.append(self.book.number(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
