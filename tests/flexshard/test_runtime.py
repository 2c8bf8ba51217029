"""Exchanges bring whole units to their owners and back, and send what they say and no more."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from support.collectives import Collectives
from support.muon import Case, Outcome, draw, part_of, place, set_grads, take_steps, weight_of
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from amalthea.core.world import World
from amalthea.flexshard.layout import Grid, StoredParameter
from amalthea.flexshard.runtime import ReplicaExchange

BF16_BYTES = 2


def experts(count: int, storage: Any = "experts") -> tuple[StoredParameter, ...]:
    return tuple(StoredParameter(f"e{i}", (count, *shape), storage) for i, shape in enumerate([(12, 24), (24, 12)]))


MIXED = (
    *experts(2, "expert_rows"),
    StoredParameter("even", (24, 8), "rows"),
    StoredParameter("uneven", (10, 8), "rows"),
    StoredParameter("two rows", (2, 8), "rows"),
    StoredParameter("cut heads", (36, 5), "rows", 9),
    StoredParameter("whole heads", (24, 5), "rows", 2),
)


# Inside a replica


def there_and_back(world: World, case: Case) -> tuple[list[str], int, int]:
    """Sends the weights to owners and twice their values back; returns what arrived wrong, and bytes."""
    muon = place(world, case)
    exchange, layout, rank = muon.exchange, muon.layout, muon.exchange.rank
    routed = [muon.slabs[i] for i in exchange.send_order]
    pieces = [slab.view(muon.params[slab.parameter].data).bfloat16() for slab in routed]
    sent = torch.cat([torch.empty(0, dtype=torch.bfloat16), *(piece.flatten() for piece in pieces)])
    with Collectives() as counted:
        stacks = exchange.finish_to_owners(exchange.launch_to_owners(sent))
        arrived = [stack.clone() for stack in stacks]
        back = exchange.finish_back(exchange.launch_back([stack.mul_(2) for stack in stacks])).clone()
    expected: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
    for index, (unit, owner) in enumerate(zip(layout.units, layout.owners, strict=True)):
        if owner.rank == rank and not layout.is_local(index):
            stored = layout.parameters[unit.parameter]
            whole = weight_of(stored).view(-1, *stored.shape[-2:])[unit.expert, unit.start : unit.stop]
            expected[tuple(whole.shape)].append(whole.bfloat16())
    wrong = []
    if len(arrived) != len(expected):
        wrong.append(f"{len(arrived)} stacks of {len(expected)}")
    for stack, units in zip(arrived, expected.values(), strict=False):
        if not torch.equal(stack, torch.stack(units)):
            wrong.append(f"units {tuple(stack.shape)} at their owner")
    if not torch.equal(back, sent * 2):
        wrong.append("results on their way back")
    assert counted.names == ["alltoall_base_"] * 2
    return wrong, counted.bytes_sent, exchange.bytes_sent


@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(1, 3), Grid(1, 4), Grid(1, 4, ep=2), Grid(1, 6, ep=2)], ids=str)
def test_units_arrive_whole_and_results_come_back(grid: Grid) -> None:
    for wrong, counted, announced in run_ranks(grid.num_ranks, there_and_back, Case(grid, MIXED)):
        assert wrong == []
        assert counted == announced


def test_a_rank_that_owns_nothing_still_takes_part() -> None:
    case = Case(Grid(1, 4), (StoredParameter("w", (8, 4), "rows"),))
    answers = run_ranks(4, there_and_back, case)
    assert [wrong for wrong, _, _ in answers] == [[]] * 4
    # Three ranks send their two rows to the owner, which sends them back.
    assert sorted(counted for _, counted, _ in answers) == [16, 16, 16, 48]


# What a step sends


@pytest.mark.parametrize(
    "grid",
    [Grid(1, ep * efsdp, ep) for ep in (1, 2, 4) for efsdp in (1, 2, 3, 4, 6) if 1 < ep * efsdp <= 6],
    ids=str,
)
def test_experts_send_nothing_where_there_are_as_many_as_ranks(grid: Grid) -> None:
    """Eight of them, so every grid here has enough; uneven counts included."""
    for outcome in run_ranks(grid.num_ranks, take_steps, Case(grid, experts(8))):
        assert outcome.num_routed == 0
        assert outcome.collectives == []
        assert outcome.bytes_sent == outcome.bytes_announced == 0


@pytest.mark.parametrize("grid", [Grid(1, 4), Grid(1, 4, ep=2)], ids=str)
def test_dense_matrices_beside_them_do_not_make_experts_travel(grid: Grid) -> None:
    dense = (StoredParameter("d", (8, 4), "rows"),)
    with_experts = run_ranks(4, take_steps, Case(grid, (*experts(8), *dense)))
    alone = run_ranks(4, take_steps, Case(grid, dense))
    assert [o.collectives for o in with_experts] == [["alltoall_base_"] * 2] * 4
    assert sum(o.bytes_sent for o in with_experts) == sum(o.bytes_sent for o in alone) == 2 * 3 * 2 * 4 * BF16_BYTES


def test_experts_cut_over_more_ranks_are_routed() -> None:
    for outcome in run_ranks(4, take_steps, Case(Grid(1, 4), experts(2, "expert_rows"))):
        assert outcome.num_routed == 4
        assert outcome.collectives == ["alltoall_base_"] * 2
        assert outcome.bytes_sent == outcome.bytes_announced
        # A rank owns one expert of a stack, and stores a quarter of the four.
        assert outcome.bytes_sent == 2 * 3 * (12 * 24 // 4) * BF16_BYTES * 2 // 2


def test_the_dense_workload_sends_at_most_6_3_megabytes_in_two_collectives() -> None:
    """32 of 512×512 over four ranks: each gives away 24 quarters of a matrix, and three quarters of 8 come and go."""
    case = Case(Grid(1, 4), tuple(StoredParameter(f"d{i}", (512, 512), "rows") for i in range(32)))
    outcomes: list[Outcome] = run_ranks(4, take_steps, case)
    for outcome in outcomes:
        assert outcome.collectives == ["alltoall_base_"] * 2
        assert outcome.bytes_sent == outcome.bytes_announced == 2 * 24 * 128 * 512 * BF16_BYTES
        assert outcome.bytes_sent <= 6.3e6


def test_owning_replicas_send_what_an_all_reduce_would() -> None:
    """Reduced in fp32 and spread in bf16, where units divide evenly: half of the rank's elements, and the other."""
    case = Case(Grid(2, 2), experts(8))
    for outcome in run_ranks(4, take_steps, case):
        assert outcome.collectives == ["_reduce_scatter_base_", "_allgather_base_"]
        stored = 2 * 4 * 12 * 24
        assert outcome.bytes_sent == outcome.bytes_announced == stored // 2 * (4 + BF16_BYTES)


# Between replicas


class Between(NamedTuple):
    """What one rank saw of an exchange between replicas."""

    wrong: list[str]
    num_buckets: int
    slabs_of_replicas: list[int]
    """How many slabs of this rank each replica owns."""
    bytes_sent: int
    bytes_announced: int


def reduce_and_spread(world: World, case: Case, max_elements: int) -> Between:
    """Reduces gradients to owners and spreads a made-up update of every slab."""
    muon = place(world, case)
    replica, rank = divmod(world.rank, case.grid.num_ranks)
    mesh = init_device_mesh("cpu", (case.grid.num_replicas, case.grid.num_ranks))
    exchange = ReplicaExchange(
        muon.slabs,
        [stored.columns for stored in case.parameters],
        replica=replica,
        num_replicas=case.grid.num_replicas,
        group=mesh.get_group(0),
        max_elements=max_elements,
    )
    set_grads(muon, world, case, 0)
    grads = muon.grad_views(range(len(muon.slabs)))
    before = [grad.clone() for grad in grads]
    whole = [part_of(draw(f"{s.name} 0", s.shape), s, case.grid, rank) for s in case.parameters]
    updates = {i: draw(f"update {rank} {i}", grads[i].shape).bfloat16() for i in range(len(grads))}
    wrong: list[str] = []
    with Collectives() as counted:
        exchange.reduce(lambda positions: nullcontext([grads[i] for i in positions]))
        got: dict[int, torch.Tensor] = {}
        mine = {i: update for i, update in updates.items() if muon.slabs[i].owner.replica == replica}
        for bucket in exchange.spread(mine, device=torch.device("cpu")):
            got |= bucket
    for position, slab in enumerate(muon.slabs):
        owned = slab.owner.replica == replica
        expected = slab.view(whole[slab.parameter]) if owned else before[position]
        if not torch.equal(grads[position], expected):
            wrong.append(f"gradient of {slab}")
        if not torch.equal(got.pop(position).view(grads[position].shape), updates[position]):
            wrong.append(f"update of {slab}")
    assert got == {}
    assert len(counted.names) == 2 * exchange.num_buckets
    owners = [slab.owner.replica for slab in muon.slabs]
    slabs_of_replicas = [owners.count(number) for number in range(case.grid.num_replicas)]
    return Between(wrong, exchange.num_buckets, slabs_of_replicas, counted.bytes_sent, exchange.bytes_sent())


@pytest.mark.parametrize("max_elements", [1 << 26, 400, 1])
@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(3, 2), Grid(2, 2, ep=2), Grid(3, 1), Grid(2, 3)], ids=str)
def test_gradients_go_to_owners_and_updates_to_all(grid: Grid, max_elements: int) -> None:
    """In one bucket, in a few, and with one slab of each replica in a bucket."""
    case = Case(grid, (*experts(6), *MIXED[2:]))
    for seen in run_ranks(case.num_ranks, reduce_and_spread, case, max_elements):
        assert seen.wrong == []
        assert seen.bytes_sent == seen.bytes_announced
        most = max(seen.slabs_of_replicas)
        assert seen.num_buckets in {1 << 26: [1], 400: range(2, most), 1: [most]}[max_elements]


def test_a_rank_without_any_slab_has_no_bucket() -> None:
    """Four ranks, two replicas of two, one matrix of one row: the second rank of each stores nothing."""
    case = Case(Grid(2, 2), (StoredParameter("w", (1, 8), "rows"),))
    answers = run_ranks(4, reduce_and_spread, case, 1 << 26)
    assert [(seen.wrong, seen.num_buckets) for seen in answers] == [([], 1), ([], 0)] * 2
