"""What a collective moves over which link, and how long that takes alone: rings, trees and all-to-alls.

Ranks are placed in order: rank r on node r // (GPUs per node), nodes in order into groups of the network. A group of
ranks with g members on a node uses the network cards of all g at once. Figures are those of the ranks' own GPU; an
uneven all-to-all ends when its slowest rank does, which this rank's bytes do not tell.

Letters: n ranks of the group, N nodes, g of the group's ranks on a node, S bytes of payload.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from amalthea.plan.clusters import Cluster
from amalthea.plan.events import Collective, Copy
from amalthea.plan.step_speeds import StepSpeeds

Link = Literal["intra_node", "inter_node", "to_host", "to_device"]
LINKS: tuple[Link, ...] = ("intra_node", "inter_node", "to_host", "to_device")


@dataclass(frozen=True)
class Reach:
    """How a group of ranks lies on a cluster, seen from one of them."""

    num_ranks: int
    on_node: int
    num_nodes: int
    across_groups: bool

    @property
    def one_node(self) -> bool:
        return self.num_nodes == 1


@dataclass(frozen=True)
class Transfer:
    """Seconds of latency, in which no link is used, then `seconds` on each link, at once, if nobody shares it."""

    latency_s: float
    seconds: dict[Link, float]

    @property
    def moving_s(self) -> float:
        return max(self.seconds.values(), default=0.0)

    @property
    def alone_s(self) -> float:
        return self.latency_s + self.moving_s


def reach(ranks: tuple[int, ...], *, rank: int, cluster: Cluster) -> Reach:
    """Where `ranks` lie. Raises ValueError where `rank` is none of them."""
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in its own group of {len(ranks)}")
    on_node = Counter(other // cluster.gpus_per_node for other in ranks)
    size = cluster.nodes_per_group
    groups = 1 if size is None else len({node // size for node in on_node})
    return Reach(len(ranks), on_node[rank // cluster.gpus_per_node], len(on_node), groups > 1)


def price_collective(collective: Collective, where: Reach, speeds: StepSpeeds) -> Transfer:
    """Time of one collective among ranks that lie so.

    all_gather of shards S: each rank sends (n − 1)·S around the ring; reduce_scatter of an input S: (n − 1)/n·S;
    all_reduce twice that; broadcast and reduce S; all_to_all (n − 1)/n·S straight to the others. In a ring over
    nodes each card carries 1/g of it. Latency: a ring's n − 1 steps, or of an all_reduce a tree's, as NCCL's tuning
    model has them; an all-to-all's peers one after the other.
    """
    if where.num_ranks == 1:
        return Transfer(0.0, {})
    if collective.kind == "all_to_all":
        within, between = _all_to_all_bytes(collective, where)
    else:
        within, between = _ring_bytes(collective, where)
    seconds: dict[Link, float] = {}
    if within:
        seconds["intra_node"] = within / speeds.node_bytes_per_s(num_ranks=where.on_node)
    if between:
        seconds["inter_node"] = between / speeds.network_bytes_per_s(across_groups=where.across_groups)
    return Transfer(_latency_s(collective, where, speeds), seconds)


def price_copy(copy: Copy, speeds: StepSpeeds) -> Transfer:
    """Time of a copy between device and host; the two directions do not share their link."""
    return Transfer(0.0, {copy.direction: copy.num_bytes / speeds.host_link_bytes_per_s})


def _all_to_all_bytes(collective: Collective, where: Reach) -> tuple[float, float]:
    payload = max(collective.bytes_out, collective.bytes_in)
    share = payload / where.num_ranks
    return share * (where.on_node - 1), share * (where.num_ranks - where.on_node)


def _ring_bytes(collective: Collective, where: Reach) -> tuple[float, float]:
    others, payload = where.num_ranks - 1, collective.bytes_out
    total = {
        "all_gather": others * payload,
        "reduce_scatter": others / where.num_ranks * payload,
        "all_reduce": 2 * others / where.num_ranks * payload,
    }.get(collective.kind, payload)
    if where.one_node:
        return total, 0.0
    # As many rings as cards, each with its part; a ring leaves a node by one card and crosses it g - 1 times.
    return total * (where.on_node - 1) / where.on_node, total / where.on_node


def _latency_s(collective: Collective, where: Reach, speeds: StepSpeeds) -> float:
    a = speeds.assumptions
    if collective.kind == "all_to_all":
        return a.collective_base_s + (where.num_ranks - 1) * a.peer_s
    if collective.kind == "all_reduce":
        hops = math.ceil(math.log2(where.num_nodes))
        return a.collective_base_s + 2 * ((where.on_node - 1) * a.node_hop_s + hops * a.network_hop_s)
    between = where.num_nodes - 1
    return a.collective_base_s + (where.num_ranks - 1 - between) * a.node_hop_s + between * a.network_hop_s
