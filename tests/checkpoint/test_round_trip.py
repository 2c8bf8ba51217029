"""What is saved under one mesh comes back bit for bit under any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.sharded import Layout, build, clear, tensors_of, wrong_names
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from amalthea.checkpoint.store import find_newest, load, save
from amalthea.core.errors import CheckpointError
from amalthea.core.world import World

STATUS = Path("/proc/self/status")
PROGRESS = {"step": 3, "samples": 2**40, "loss": 1.25, "languages": ["bg", "mt"]}
ONE = Layout()
FSDP4 = Layout(efsdp=4)
FSDP2 = Layout(efsdp=2)
HSDP = Layout(dp_replicate=2, efsdp=2)
EP4 = Layout(ep=4)
EP2 = Layout(ep=2)
EP2_FSDP2 = Layout(efsdp=2, ep=2)
HSDP_EP2 = Layout(dp_replicate=2, ep=2)


def save_layout(world: World, run_dir: Path, layout: Layout, step: int = 3) -> Path:
    tensors = tensors_of(build(layout))
    return save(run_dir, step=step, tensors=tensors, progress=PROGRESS, world=world, keep=2)


def load_layout(world: World, run_dir: Path, layout: Layout) -> tuple[dict, list[str], list[str]]:
    """Progress, names that are wrong before the load (all) and after it (none)."""
    tensors = tensors_of(build(layout))
    clear(tensors)
    before = wrong_names(tensors)
    found = find_newest(run_dir)
    assert found.path is not None
    assert found.skipped == ()
    return load(found.path, tensors), before, wrong_names(tensors)


def check_round_trip(run_dir: Path, source: Layout, *targets: Layout) -> None:
    paths = run_ranks(source.num_ranks, save_layout, run_dir, source)
    assert paths == [run_dir / "checkpoints" / "step_3"] * source.num_ranks
    for target in targets:
        for progress, before, after in run_ranks(target.num_ranks, load_layout, run_dir, target):
            assert progress == PROGRESS
            assert len(before) == 10
            assert after == [], f"{source} → {target}"


@pytest.mark.case(5)
@pytest.mark.parametrize("layout", [ONE, FSDP2, FSDP4, HSDP], ids=str)
def test_same_layout(tmp_path: Path, layout: Layout) -> None:
    check_round_trip(tmp_path, layout, layout)


@pytest.mark.case(5)
def test_other_numbers_of_ranks_and_replicas(tmp_path: Path) -> None:
    check_round_trip(tmp_path / "a", FSDP4, FSDP2, ONE, HSDP)
    check_round_trip(tmp_path / "b", HSDP, FSDP4, ONE)
    check_round_trip(tmp_path / "c", ONE, FSDP2, FSDP4)


@pytest.mark.case(1)
def test_every_expert_survives_a_change_of_expert_parallelism(tmp_path: Path) -> None:
    check_round_trip(tmp_path / "a", EP4, EP2, ONE, EP2_FSDP2, FSDP4)
    check_round_trip(tmp_path / "b", EP2_FSDP2, EP2_FSDP2, EP4, EP2, ONE, HSDP_EP2)
    check_round_trip(tmp_path / "c", HSDP_EP2, EP2_FSDP2, ONE)


@pytest.mark.case(1)
@pytest.mark.case(5)
def test_experts_of_a_rank_that_do_not_divide_by_its_shards(tmp_path: Path) -> None:
    uneven = Layout(efsdp=2, ep=2, num_experts=6)
    check_round_trip(tmp_path, uneven, uneven, Layout(num_experts=6), Layout(efsdp=2, num_experts=6))


def expert_placements(world: World) -> list[str]:
    return [type(placement).__name__ for placement in build(EP2_FSDP2).experts.w.placements]  # type: ignore[union-attr]


def test_the_layout_under_test_is_a_shard_of_a_shard() -> None:
    assert run_ranks(4, expert_placements) == [["_StridedShard", "Shard"]] * 4


def save_per_rank_values(world: World, run_dir: Path) -> str:
    tensors = {"experts.w": torch.full((2, 3), float(world.rank)), "same": torch.ones(3)}
    with pytest.raises(CheckpointError) as caught:
        save(run_dir, step=1, tensors=tensors, progress={}, world=world, keep=1)
    return str(caught.value)


@pytest.mark.case(1)
def test_plain_tensors_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    messages = run_ranks(2, save_per_rank_values, tmp_path)
    assert messages[0] == messages[1]
    assert "experts.w is another than on rank 0 and no DTensor" in messages[0]
    assert "same" not in messages[0]
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.case(2)
def test_two_saves_are_two_folders_and_state_belongs_to_names(tmp_path: Path) -> None:
    first = {"a.momentum": torch.zeros(2, 2), "b.momentum": torch.ones(2, 2)}
    second = {name: tensor + 10 for name, tensor in first.items()}
    paths = [
        save(tmp_path, step=step, tensors=tensors, progress={"step": step}, world=World(), keep=2)
        for step, tensors in ((1, first), (2, second))
    ]
    for path, tensors in zip(paths, (first, second), strict=True):
        back = {name: torch.full((2, 2), -1.0) for name in ("b.momentum", "a.momentum")}  # another order
        assert load(path, back)["step"] == int(path.name.removeprefix("step_"))
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.case(3)
def test_a_buffer_updated_in_place_round_trips_into_the_same_storage(tmp_path: Path) -> None:
    model = build(ONE)
    model.router_bias += torch.arange(8.0)  # type: ignore[operator]
    save(tmp_path, step=1, tensors=model.state_dict(), progress={}, world=World(), keep=1)
    other = build(ONE)
    bias, storage = other.router_bias, other.router_bias.data_ptr()  # type: ignore[operator]
    assert not torch.equal(bias, model.router_bias)  # type: ignore[arg-type]
    load(tmp_path / "checkpoints" / "step_1", other.state_dict())
    assert other.router_bias is bias
    assert bias.data_ptr() == storage  # type: ignore[operator]
    assert torch.equal(bias, model.router_bias)  # type: ignore[arg-type]


def save_only_where_owned(world: World, run_dir: Path) -> None:
    """State of an owning replica: one of two ranks has the name at all."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    tensors: dict[str, torch.Tensor] = {"w": distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])}
    if world.rank == 1:
        tensors["momentum"] = torch.arange(4.0)
    save(run_dir, step=1, tensors=tensors, progress={}, world=world, keep=1)


def test_a_tensor_that_one_rank_has_alone(tmp_path: Path) -> None:
    run_ranks(2, save_only_where_owned, tmp_path)
    back = {"w": torch.zeros(3), "momentum": torch.zeros(4)}
    load(tmp_path / "checkpoints" / "step_1", back)
    assert back["w"].tolist() == [0, 1, 2]
    assert back["momentum"].tolist() == [0, 1, 2, 3]


def more_ranks_than_rows(world: World, run_dir: Path) -> list[float]:
    mesh = init_device_mesh("cpu", (world.size,))
    tensors = {"w": distribute_tensor(torch.arange(2.0), mesh, [Shard(0)])}
    path = save(run_dir, step=1, tensors=tensors, progress={}, world=world, keep=1)
    clear(tensors)
    load(path, tensors)
    return tensors["w"].full_tensor().tolist()


def test_ranks_without_a_row(tmp_path: Path) -> None:
    assert run_ranks(4, more_ranks_than_rows, tmp_path) == [[0.0, 1.0]] * 4


def test_one_process_without_a_group_reads_what_four_ranks_wrote(tmp_path: Path) -> None:
    run_ranks(4, save_layout, tmp_path, EP2_FSDP2)
    assert not dist.is_initialized()
    weights = {f"model.{name}": tensor for name, tensor in build(ONE).state_dict().items()}
    clear(weights)
    path = find_newest(tmp_path).path
    assert path is not None
    assert load(path, weights, strict=False) == PROGRESS
    assert wrong_names(weights) == []


def peak_growth_bytes(world: World, run_dir: Path) -> tuple[int, int]:
    """How much the resident set grew at its peak during a save, and during a load, of 16 tensors of 4 MiB."""
    tensors = {f"w{index}": torch.full((1024, 1024), float(index)) for index in range(16)}
    save(run_dir, step=1, tensors={"w": torch.zeros(9)}, progress={}, world=world, keep=1)

    def resident_bytes(key: str) -> int:
        (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(key)]
        return int(line.split()[1]) * 1024

    growth = []
    for action in (
        lambda: save(run_dir, step=2, tensors=tensors, progress={}, world=world, keep=1),
        lambda: load(run_dir / "checkpoints" / "step_2", tensors),
    ):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present from here on
        before = resident_bytes("VmRSS")
        action()
        growth.append(resident_bytes("VmHWM") - before)
    return growth[0], growth[1]


@pytest.mark.skipif(not STATUS.exists(), reason="reads the peak of resident memory from Linux's /proc")
def test_a_few_tensors_at_a_time_are_in_host_memory(tmp_path: Path) -> None:
    ((saving, loading),) = run_ranks(1, peak_growth_bytes, tmp_path)
    assert saving < 20 * 2**20
    assert loading < 20 * 2**20


def test_few_files(tmp_path: Path) -> None:
    run_ranks(4, save_layout, tmp_path, EP2_FSDP2)
    names = sorted(path.name for path in (tmp_path / "checkpoints" / "step_3").iterdir())
    data = [f"__{rank}_0.distcp" for rank in range(4)]
    assert names == sorted([".metadata", "complete.json", "progress.json", *data])
    record = json.loads((tmp_path / "checkpoints" / "step_3" / "complete.json").read_text())
    assert sorted(record["files"]) == sorted([".metadata", "progress.json", *data])
    assert (record["step"], record["num_ranks"], record["format"]) == (3, 4, 1)
    assert str(tmp_path) not in (tmp_path / "checkpoints" / "step_3" / ".metadata").read_bytes().decode("latin1")
