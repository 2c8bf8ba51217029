"""Expert parallelism computes what one rank with all experts computes, however skewed the routing.

Shape legend: T tokens of a rank, D hidden, E experts, K choices per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import comb

import pytest
import torch
import torch.distributed as dist
from support.collectives import Collectives
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from amalthea.core.world import World
from amalthea.model.config import MoEConfig
from amalthea.model.moe import Experts, MoE
from amalthea.parallel.experts import AllToAllDispatcher
from amalthea.parallel.hierarchical import HierarchicalDispatcher

D, E = 16, 8


@dataclass(frozen=True)
class Routing:
    """`bias` by expert draws tokens; `tokens` by rank."""

    top_k: int = 2
    bias: dict[int, float] = field(default_factory=dict)
    tokens: tuple[int, ...] = (12, 12, 12, 12)


ROUTINGS = {
    "balanced": Routing(),
    "all-experts": Routing(top_k=E),
    "one-expert": Routing(top_k=1, bias={5: 10.0}),
    "first-rank-only": Routing(bias={0: 10.0, 1: 10.0}),
    "last-rank-only": Routing(bias={6: 10.0, 7: 10.0}),
    "other-lengths": Routing(tokens=(3, 20, 1, 9)),
}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layer(routing: Routing) -> MoE:
    """All experts, the same on every rank."""
    moe = MoE(D, MoEConfig(num_experts=E, top_k=routing.top_k, expert_hidden_size=8, num_shared_experts=0))
    for seed, parameter in enumerate(moe.parameters()):
        parameter.data = 0.5 * draw(*parameter.shape, seed=seed)
    for expert, value in routing.bias.items():
        moe.router.bias[expert] = value
    return moe


def part_of(whole: MoE, routing: Routing, world: World, nodes: int | None = None, num_chunks: int = 1) -> MoE:
    """The layer with this rank's experts and tokens sent by all-to-all, straight or by way of so many nodes."""
    part = make_layer(routing)
    mine = slice(world.rank * E // world.size, (world.rank + 1) * E // world.size)
    part.experts = Experts(D, part.router.config)
    for name, stack in whole.experts.named_parameters():
        setattr(part.experts, name, nn.Parameter(stack.detach()[mine].clone()))
    assert dist.group.WORLD is not None
    part.dispatcher = AllToAllDispatcher(E, group=dist.group.WORLD, num_chunks=num_chunks)
    if nodes is not None:
        mesh = init_device_mesh("cpu", (nodes, world.size // nodes), mesh_dim_names=("node", "local"))
        across, inside = mesh.get_group("node"), mesh.get_group("local")
        part.dispatcher = HierarchicalDispatcher(E, across=across, inside=inside, num_chunks=num_chunks)
    return part


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal to a millionth of the greatest value: sums over ranks run in another order."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 * max(1.0, float(expected.abs().max())), msg=what)


def compare(world: World, routing: Routing, nodes: int | None = None, num_chunks: int = 1) -> int:
    """Compares output, counts and all gradients with the local layer's; returns how many rows came to this rank."""
    whole = make_layer(routing)
    part = part_of(whole, routing, world, nodes, num_chunks)
    tokens = routing.tokens[world.rank]
    x, upstream = draw(1, tokens, D, seed=100 + world.rank), draw(1, tokens, D, seed=200 + world.rank)
    results = []
    for layer in (part, whole):
        leaf = x.clone().requires_grad_()
        out, counts, _ = layer(leaf)
        out.backward(upstream)
        assert leaf.grad is not None
        results.append((out.detach(), counts, leaf.grad, layer.router.weight.grad))
    (out, counts, x_grad, router_grad), (expected, local_counts, x_expected, router_expected) = results
    close(out, expected, "output")
    close(x_grad, x_expected, "gradient by tokens")
    close(router_grad, router_expected, "gradient by router")
    assert torch.equal(counts, local_counts)
    assert x_grad.any()

    mine = slice(world.rank * E // world.size, (world.rank + 1) * E // world.size)
    for name, stack in whole.experts.named_parameters():
        assert stack.grad is not None
        dist.all_reduce(stack.grad)
        grad = part.experts.get_parameter(name).grad
        assert grad is not None, f"{name} gets a gradient, of zeros if need be, so that ranks reduce alike"
        close(grad, stack.grad[mine], f"gradient by {name}")
    dist.all_reduce(counts)
    return int(counts[mine].sum())


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ROUTINGS)
def test_dispatch_equals_local(name: str, num_ranks: int) -> None:
    routing = ROUTINGS[name]
    received = run_ranks(num_ranks, compare, routing)
    assert sum(received) == sum(routing.tokens[:num_ranks]) * routing.top_k
    if name in ("one-expert", "first-rank-only", "last-rank-only"):
        assert received.count(0) == num_ranks - 1, "all others receive nothing"


@pytest.mark.parametrize(("num_ranks", "nodes"), [(4, 2), (4, 4), (4, 1), (8, 2), (8, 4)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_dispatch_by_node_equals_local(name: str, num_ranks: int, nodes: int) -> None:
    routing = ROUTINGS[name]
    routing = replace(routing, tokens=routing.tokens * (num_ranks // 4))
    received = run_ranks(num_ranks, compare, routing, nodes)
    assert sum(received) == sum(routing.tokens) * routing.top_k


@pytest.mark.parametrize("nodes", [None, 2])
@pytest.mark.parametrize("num_chunks", [2, 5])
@pytest.mark.parametrize("name", ROUTINGS)
def test_chunks_equal_local(name: str, num_chunks: int, nodes: int | None) -> None:
    """Also where a rank has fewer tokens than there are chunks."""
    received = run_ranks(4, compare, ROUTINGS[name], nodes, num_chunks)
    assert sum(received) == sum(ROUTINGS[name].tokens) * ROUTINGS[name].top_k


@dataclass(frozen=True)
class Crossing:
    """Rows of [D] that left this rank's node, and those that its routing needs at the least."""

    flat: int
    by_node: int
    needed_flat: int
    needed_by_node: int


def cross(world: World, routing: Routing) -> Crossing:
    """On 2 nodes of 2 ranks, counted from the splits of real all-to-alls of rows."""
    whole = make_layer(routing)
    x = draw(1, routing.tokens[world.rank], D, seed=world.rank)
    choices = whole.router(x).experts
    home = world.rank // 2
    node = choices // (E // 2)
    crossed = []
    for nodes in (None, 2):
        part = part_of(whole, routing, world, nodes)
        with Collectives() as seen:
            part(x)
        # Forward sends each row out and its result back: twice the rows of one way, over all ranks.
        crossed.append(seen.rows_sent(to=lambda rank: rank // 2 != home, columns=D))
    return Crossing(*crossed, int((node != home).sum()), int((node != home).any(dim=1).sum()))


def test_bytes_between_nodes_fall_to_one_row_a_node() -> None:
    """384 tokens, 4 of 8 experts, 2 nodes: 2 rows of 4 would cross, and 1 − C(4, 4) / C(8, 4) = 0.986 do."""
    routing = Routing(top_k=4, tokens=(384, 384, 384, 384))
    crossings = run_ranks(4, cross, routing)
    ways = [(sum(c.flat for c in crossings), sum(c.needed_flat for c in crossings))]
    ways.append((sum(c.by_node for c in crossings), sum(c.needed_by_node for c in crossings)))
    for counted, needed in ways:
        assert counted == 2 * needed, "out and back"
    share = ways[1][0] / ways[0][0]
    expected = (1 - comb(4, 4) / comb(8, 4)) / (4 * 4 / 8)
    assert share == pytest.approx(expected, rel=0.03)


def send_twice(world: World, nodes: int | None) -> bool:
    """Whether two passes give the same bits."""
    routing = ROUTINGS["balanced"]
    part = part_of(make_layer(routing), routing, world, nodes)
    x = draw(1, 12, D, seed=world.rank)
    passes = []
    for _ in range(2):
        part.zero_grad()
        out, _, _ = part(x)
        out.square().sum().backward()
        passes.append([out.detach(), *(p.grad for p in part.parameters() if p.grad is not None)])
        assert len(passes[-1]) == 5
    return all(torch.equal(a, b) for a, b in zip(*passes, strict=True))


@pytest.mark.parametrize("nodes", [None, 2])
def test_dispatch_repeats_bit_for_bit(nodes: int | None) -> None:
    assert run_ranks(4, send_twice, nodes) == [True] * 4
