"""The pool runs tasks on real ranks, forgets between tasks, and says which rank failed and how."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from amalthea.core.world import World
from support.ranks import RankError, run_ranks


@dataclass(frozen=True)
class Report:
    world: World
    total: torch.Tensor
    num_threads: int
    pid: int


def reduce(world: World, values: torch.Tensor) -> Report:
    total = values * (world.rank + 1)
    dist.all_reduce(total)
    return Report(world, total, torch.get_num_threads(), os.getpid())


def use_mesh(world: World) -> tuple[torch.Tensor, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(8.0)
    tensor = distribute_tensor(whole, mesh["b"], [Shard(0)])
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor(), len(dist.distributed_c10d._world.pg_map)


def num_groups(world: World) -> int:
    return len(dist.distributed_c10d._world.pg_map)


def draw(world: World) -> float:
    return torch.rand(()).item()


def backward(world: World) -> float:
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    return x.grad.sum().item()


def fail_on(world: World, rank: int) -> None:
    print(f"rank {world.rank} was here")
    if world.rank == rank:
        raise ValueError(f"broken on {rank}")
    dist.barrier()  # waits for a rank that never comes


def hang_on(world: World, rank: int) -> None:
    if world.rank == rank:
        threading.Event().wait()


def die_on(world: World, rank: int) -> None:
    if world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def unpicklable(world: World) -> object:
    return threading.Lock()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_results_come_back_by_rank(num_ranks: int) -> None:
    reports = run_ranks(num_ranks, reduce, torch.tensor([1.0, 2.0]))
    factor = num_ranks * (num_ranks + 1) / 2
    assert [report.world.rank for report in reports] == list(range(num_ranks))
    assert all(report.world.size == num_ranks and report.num_threads == 1 for report in reports)
    assert all(report.total.tolist() == [factor, 2 * factor] for report in reports)
    assert len({report.pid for report in reports} | {os.getpid()}) == num_ranks + 1


def test_a_pool_is_reused_and_quick() -> None:
    values = torch.zeros(1)
    first = [report.pid for report in run_ranks(2, reduce, values)]
    started = time.perf_counter()
    for _ in range(20):
        assert [report.pid for report in run_ranks(2, reduce, values)] == first
    assert (time.perf_counter() - started) / 20 < 0.5


def test_groups_and_seed_do_not_leak_into_the_next_task() -> None:
    for whole, groups in run_ranks(4, use_mesh):
        assert torch.equal(whole, torch.arange(8.0))
        assert groups > 1
    assert run_ranks(4, num_groups) == [1] * 4
    assert len(set(run_ranks(2, draw) + run_ranks(2, draw))) == 1


def test_backward_works_after_backward_in_the_parent() -> None:
    assert backward(World()) == 6.0
    assert run_ranks(2, backward) == [6.0, 6.0]


def test_an_exception_names_the_rank_and_shows_its_traceback_and_output() -> None:
    with pytest.raises(RankError, match=r"rank 2 of 4 in fail_on") as caught:
        run_ranks(4, fail_on, 2)
    assert list(caught.value.failures) == [2]
    assert "ValueError: broken on 2" in str(caught.value)
    assert "in fail_on" in str(caught.value)
    assert "rank 2 was here" in str(caught.value)
    assert len(run_ranks(4, num_groups)) == 4, "a new pool takes the next task"


def test_a_hang_is_ended_and_located() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 in hang_on: no result after 0\.5 s") as caught:
        run_ranks(2, hang_on, 1, timeout_s=0.5)
    assert list(caught.value.failures) == [1]
    assert "hang_on" in str(caught.value).split("no result", 1)[1], "the dump says where it was"


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 in die_on: the process died") as caught:
        run_ranks(2, die_on, 0)
    assert 0 in caught.value.failures


def test_a_result_that_does_not_pickle_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        run_ranks(1, unpicklable)


def test_a_module_newer_than_the_workers_is_loaded_from_its_file(tmp_path: Path) -> None:
    run_ranks(2, num_groups)  # the workers exist
    path = tmp_path / "late_module.py"
    path.write_text("def rank(world, add):\n    return world.rank + add\n")
    import importlib.util

    spec = importlib.util.spec_from_file_location("late_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert run_ranks(2, module.rank, 5) == [5, 6]


def test_tensors_travel_by_value() -> None:
    assert b"/torch_" not in pickle.dumps(torch.zeros(2)), "no shared-memory file behind a pickled tensor"
