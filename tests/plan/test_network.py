"""Collectives priced against counting by hand, and against sending the pieces one by one."""

from __future__ import annotations

import pytest
from support.timelines import ROUND, exact

from amalthea.plan.clusters import Cluster, get_cluster
from amalthea.plan.events import Collective, CollectiveKind, Copy
from amalthea.plan.network import Reach, Transfer, price_collective, price_copy, reach
from amalthea.plan.step_speeds import Assumptions, StepSpeeds

GB = 10**9


def priced(
    kind: CollectiveKind,
    ranks: tuple[int, ...],
    bytes_out: int,
    *,
    bytes_in: int = 0,
    cluster: Cluster = ROUND,
    assumptions: Assumptions | None = None,
) -> Transfer:
    collective = Collective(kind, "axis", ranks, bytes_out, "s", "compute", "bfloat16", bytes_in)
    where = reach(ranks, rank=ranks[0], cluster=cluster)
    return price_collective(collective, where, StepSpeeds(cluster, assumptions or exact()))


def test_where_ranks_lie() -> None:
    jupiter = get_cluster("jupiter")
    assert reach((4, 5, 6, 7), rank=5, cluster=jupiter) == Reach(4, 4, 1, False)
    assert reach(tuple(range(0, 384, 4)), rank=8, cluster=jupiter) == Reach(96, 1, 96, False)
    assert reach(tuple(range(384)), rank=0, cluster=jupiter) == Reach(384, 4, 96, False)
    # Four replicas of 96 nodes do not fit a group of 240.
    assert reach((0, 384, 768, 1152), rank=0, cluster=jupiter) == Reach(4, 1, 4, True)
    assert reach((0, 384), rank=0, cluster=jupiter).across_groups is False
    with pytest.raises(ValueError, match="rank 3 is not in its own group of 2"):
        reach((0, 1), rank=3, cluster=jupiter)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_a_ring_sends_what_sending_piece_by_piece_adds_up_to(kind: CollectiveKind, num_ranks: int) -> None:
    """On one node. Around the ring go all pieces but the last for each pass; an all-reduce is two passes."""
    wide = Cluster(**{**vars(ROUND), "gpus_per_node": 8})
    payload = 10 * GB
    piece = payload if kind == "all_gather" else payload / num_ranks
    passes = 2 if kind == "all_reduce" else 1
    sent = sum(piece for _ in range(passes) for _ in range(num_ranks - 1))
    found = priced(kind, tuple(range(num_ranks)), payload, cluster=wide)
    assert found.seconds == {"intra_node": pytest.approx(sent / 100e9)}
    assert found.latency_s == 0


def test_the_cards_of_a_node_carry_a_ring_together() -> None:
    # One rank on each of four nodes: its card carries three shards of 1 GB at 10 GB/s.
    assert priced("all_gather", (0, 2, 4, 6), GB).seconds == {"inter_node": pytest.approx(0.3)}
    # Both ranks of each: seven shards, of which each card has half and the link inside the node the other.
    both = priced("all_gather", tuple(range(8)), GB)
    assert both.seconds == {"inter_node": pytest.approx(0.35), "intra_node": pytest.approx(0.035)}
    assert both.alone_s == pytest.approx(0.35)


def test_an_all_to_all_goes_straight_to_each_rank() -> None:
    # A quarter of 8 GB stays, a quarter goes to the neighbour, half to the other node.
    found = priced("all_to_all", (0, 1, 2, 3), 8 * GB)
    assert found.seconds == {"inter_node": pytest.approx(0.4), "intra_node": pytest.approx(0.02)}
    # Who receives more than it sends waits for that.
    skewed = priced("all_to_all", (0, 1, 2, 3), 8 * GB, bytes_in=16 * GB)
    assert skewed.moving_s == pytest.approx(0.8)


def test_broadcast_and_reduce_pass_everything_on_once() -> None:
    for kind in ("broadcast", "reduce"):
        assert priced(kind, (0, 2, 4), 3 * GB).seconds == {"inter_node": pytest.approx(0.3)}  # type: ignore[arg-type]


def test_latency_counts_the_steps_of_rings_and_trees() -> None:
    hops = exact(collective_base_s=1000.0, node_hop_s=1.0, network_hop_s=100.0, peer_s=7.0)
    ring = priced("all_gather", tuple(range(8)), GB, assumptions=hops)
    assert ring.latency_s == 1000 + 4 * 1 + 3 * 100
    tree = priced("all_reduce", tuple(range(8)), GB, assumptions=hops)
    assert tree.latency_s == 1000 + 2 * (1 * 1 + 2 * 100)
    assert priced("all_to_all", (0, 1, 2), GB, assumptions=hops).latency_s == 1000 + 2 * 7
    assert priced("all_gather", (0, 1), GB, assumptions=hops).latency_s == 1000 + 1


def test_one_rank_has_nothing_to_send() -> None:
    assert priced("all_reduce", (1,), GB, assumptions=Assumptions()).alone_s == 0


def test_between_groups_of_nodes_the_network_may_be_slower() -> None:
    jupiter = get_cluster("jupiter")
    near, far = (0, 384), (0, 1152)
    times = [
        priced("all_reduce", ranks, 25 * GB, cluster=jupiter, assumptions=exact(across_groups=0.5)).moving_s
        for ranks in (near, far)
    ]
    assert times == [pytest.approx(1.0), pytest.approx(2.0)]


def test_a_copy_takes_its_own_direction() -> None:
    found = price_copy(Copy("to_host", 40 * GB, "out"), StepSpeeds(ROUND, exact()))
    assert (found.latency_s, found.seconds) == (0, {"to_host": 2.0})


def test_the_reference_model_takes_the_network_for_as_long_as_counted_elsewhere() -> None:
    """bf16 weights gathered twice and gradients scattered once by 384 ranks at line rate: 56.3 s of a card's time."""
    jupiter, ranks = get_cluster("jupiter"), tuple(range(384))
    shard = 2 * 951_875_000_000 // 384
    gather = priced("all_gather", ranks, shard, cluster=jupiter).seconds["inter_node"]
    scatter = priced("reduce_scatter", ranks, shard * 384, cluster=jupiter).seconds["inter_node"]
    assert gather == pytest.approx(scatter)
    assert 2 * gather + scatter == pytest.approx(56.3, rel=0.02)
