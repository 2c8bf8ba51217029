"""A process learns its place from the launcher, or refuses to start."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from amalthea.core.errors import ConfigError
from amalthea.core.world import World
from amalthea.launch import world as launch_world
from amalthea.launch.world import (
    Place,
    discover,
    find_place,
    process_group,
    share_threads,
    slurm_rendezvous,
    threads_of_ranks,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "jwb[0001-0002]",
}


def problem(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        find_place(environ)
    (line,) = caught.value.problems
    return line


def test_alone() -> None:
    assert find_place({}) == Place("single", rank=0, size=1, local_rank=0, local_size=1)
    assert discover(device="cpu", environ={}) == World()


def test_torchrun() -> None:
    assert find_place(TORCHRUN) == Place("torchrun", rank=5, size=8, local_rank=1, local_size=4)
    world = discover(device="cpu", environ=TORCHRUN)
    assert world == World(rank=5, size=8, local_rank=1, local_size=4, device="cpu")
    assert not world.is_main


def test_srun() -> None:
    assert find_place(SLURM) == Place("slurm", rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize(
    ("tasks", "node", "local_size"), [("4(x2),1", "0", 4), ("4(x2),1", "2", 1), ("2,3", "1", 3), ("8", "0", 8)]
)
def test_srun_tasks_of_this_node(tasks: str, node: str, local_size: int) -> None:
    environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node, "SLURM_LOCALID": "0"}
    assert find_place(environ).local_size == local_size


def test_a_job_of_one_task_is_alone() -> None:
    assert find_place(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).launcher == "single"


def test_a_shell_inside_an_allocation_is_alone() -> None:
    assert find_place({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}).launcher == "single"


def test_torchrun_under_srun_counts_its_ranks() -> None:
    two_agents = SLURM | TORCHRUN | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    assert find_place(two_agents).launcher == "torchrun"


def test_ranks_set_by_hand_under_srun() -> None:
    by_hand = {key: value for key, value in TORCHRUN.items() if key not in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE")}
    assert find_place(SLURM | by_hand).size == 8


@pytest.mark.case(9)
def test_a_world_of_each_node_s_own_is_refused() -> None:
    own_world = SLURM | TORCHRUN | {"SLURM_NTASKS": "2", "WORLD_SIZE": "4", "RANK": "1"}
    line = problem(own_world)
    assert "WORLD_SIZE is 4, but srun started 2 tasks of 4 ranks; expected 8" in line
    assert "--nnodes" in line
    assert "WORLD_SIZE is 1" in problem(SLURM | TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1"})


@pytest.mark.case(9)
def test_a_batch_script_without_srun_is_refused() -> None:
    batch = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}
    line = problem(batch)
    assert "this Slurm job has 8 tasks" in line
    assert "put srun before the command" in line


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE not; start with torchrun or srun"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "RANK, WORLD_SIZE set but MASTER_ADDR, MASTER_PORT not"),
        ({"RANK": "x"}, "RANK is 'x'; expected a whole number"),
        ({"RANK": "-1"}, "RANK is '-1'; expected a whole number"),
        ({"RANK": "8"}, "torchrun gave rank 8 of 8; expected 0 to 7"),
        ({"LOCAL_RANK": "4"}, "torchrun gave local rank 4 of 4; expected 0 to 3"),
    ],
)
def test_variables_that_contradict_each_other(change: dict[str, str | None], line: str) -> None:
    environ = {key: value for key, value in (TORCHRUN | change).items() if value is not None}
    assert line in problem(environ)


def fake_scontrol(folder: Path, script: str) -> dict[str, str]:
    """SLURM's environment with a `scontrol` of our own as the only program."""
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return SLURM | {"PATH": str(folder)}


@pytest.mark.case(9)
def test_scontrol_names_the_first_node(tmp_path: Path) -> None:
    environ = fake_scontrol(tmp_path, 'test "$*" = "show hostnames jwb[0001-0002]" && echo jwb0001 && echo jwb0002')
    address, port = slurm_rendezvous(environ)
    assert address == "jwb0001"
    assert port == 20_000 + 123_456 % 20_000


@pytest.mark.case(9)
def test_without_scontrol_nobody_calls_itself_localhost(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scontrol is not here .* set MASTER_ADDR to the name of the job's first"):
        slurm_rendezvous(SLURM | {"PATH": str(tmp_path)})
    with (
        pytest.raises(ConfigError, match="scontrol is not here"),
        process_group(World(rank=5, size=8), environ=SLURM | {"PATH": str(tmp_path)}),
    ):
        pass
    assert not dist.is_initialized()


@pytest.mark.case(9)
@pytest.mark.parametrize("script", ["echo 'Invalid hostlist' >&2; exit 1", "exit 0"])
def test_a_scontrol_that_fails_is_an_error(tmp_path: Path, script: str) -> None:
    with pytest.raises(ConfigError, match="scontrol cannot tell the first node"):
        slurm_rendezvous(fake_scontrol(tmp_path, script))


@pytest.mark.case(9)
def test_without_a_node_list_is_an_error() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR and SLURM_JOB_NODELIST are not set"):
        slurm_rendezvous({"SLURM_JOB_ID": "1"})


@pytest.mark.case(18)
def test_two_jobs_on_a_node_take_different_ports() -> None:
    ports = [slurm_rendezvous({"SLURM_JOB_ID": str(job), "MASTER_ADDR": "here"})[1] for job in range(1000, 1100)]
    assert len(set(ports)) == 100
    assert all(1024 < port < 65_536 for port in ports)
    assert slurm_rendezvous({"SLURM_JOB_ID": "7", "MASTER_ADDR": "here", "MASTER_PORT": "2"}) == ("here", 2)


def test_auto_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert discover(environ={}).device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert discover(environ={}).device == "cuda"
    assert discover(environ=TORCHRUN).torch_device == "cuda:1"
    assert discover(device="cpu", environ={}).device == "cpu"


def test_cuda_asked_for_and_absent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device=cuda, but torch .* finds no GPU; use device=cpu"):
        discover(device="cuda", environ={})


def test_more_processes_than_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"local rank 1 has no GPU: this process sees 1; .*no --gpus-per-task"):
        discover(environ=TORCHRUN)


def test_threads_are_shared_among_the_processes_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert share_threads(World(size=4, local_size=4), environ={}) == 4
    assert share_threads(World(size=32, local_size=32), environ={}) == 1
    assert share_threads(World(size=4, local_size=4), environ={"SLURM_CPUS_PER_TASK": "12"}) == 12
    assert share_threads(World(size=4, local_size=4), environ={"OMP_NUM_THREADS": "2"}) is None
    assert share_threads(World(), environ={}) is None
    assert taken == [4, 1, 12]


def test_threads_of_ranks_that_are_not_started_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    job = {"SLURM_JOB_ID": "7"}
    assert threads_of_ranks(4, environ=job) == share_threads(World(size=4, local_size=4), environ=job) == 4
    assert threads_of_ranks(4, environ={**job, "SLURM_CPUS_PER_TASK": "12"}) == 12
    assert threads_of_ranks(4, environ={"OMP_NUM_THREADS": "2"}) is None
    assert threads_of_ranks(1, environ={}) is None
    # As torchrun does it.
    assert threads_of_ranks(4, environ={}) == 1


def test_one_process_has_a_group_too() -> None:
    with process_group(World(), environ={}) as store:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size() == 1
        assert store.compare_set("key", "", "value") == b"value"
    assert not dist.is_initialized()


def test_the_group_is_gone_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), process_group(World(), environ={}):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_the_environment_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert discover(device="cpu").rank == 5
    assert not launch_world.is_main_process()
