"""A trace against real steps on gloo ranks, against exact accounting, and against itself."""

from __future__ import annotations

import gc
import resource
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.tiny import SEQ_LEN, SEQUENCES, microbatches, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.world import World
from amalthea.plan.accounting import account
from amalthea.plan.events import (
    COMPUTE,
    Allocate,
    Collective,
    Copy,
    Free,
    HostMemory,
    Kernel,
    Phase,
    Record,
    Synchronize,
    Trace,
    Wait,
)
from amalthea.plan.shapes import parameter_shapes
from amalthea.plan.trace import Workload, trace_step
from amalthea.plan.trace.collectives import Collectives
from amalthea.plan.trace.recorder import Recorder
from amalthea.plan.trace.routing import flat_splits, node_splits, rows_by_node
from amalthea.plan.trace.tracer import Tracer
from amalthea.plan.trace.world import followed_resizes
from amalthea.recipes.europa_1t import europa_1t
from amalthea.train.build import build
from amalthea.train.step import train_step

# Every token visits every expert, so that real routing is as balanced as the traced one; a norm that no gradient
# stays below, so that both scale.
REAL: dict[str, Any] = {
    "model__moe__top_k": 8,
    "train__microbatch_sequences": 4,
    "train__max_grad_norm": 1e-6,
    "optim__experts": "muon",
    "optim__matrices": "muon",
}
RECOMPUTE: dict[str, Any] = {"memory__recompute": "block"}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks, uneven shards, recompute": (
        2,
        {"model__vocab_size": 97, "data__tokenizer__vocab_size": 97} | RECOMPUTE,
    ),
    "4 ranks, hsdp-ep2, recompute": (4, {"parallel__ep": 2, "parallel__dp_replicate": 2} | RECOMPUTE),
    "4 ranks, by node, cp2": (
        4,
        {"parallel__ep": 4, "parallel__cp": 2, "parallel__dispatch": "hierarchical", "parallel__ranks_per_node": 2},
    ),
    "4 ranks, by node, 2 chunks, recompute": (
        4,
        {"parallel__ep": 4, "parallel__dispatch": "hierarchical", "parallel__ranks_per_node": 2}
        | {"parallel__dispatch_chunks": 2}
        | RECOMPUTE,
    ),
    "2 ranks, ep2, 2 chunks, recompute": (2, {"parallel__ep": 2, "parallel__dispatch_chunks": 2} | RECOMPUTE),
    "4 ranks, hsdp repeated": (4, {"parallel__dp_replicate": 2, "optim__replicas": "repeated"}),
    "4 ranks, ep2, async, 2 passes": (
        4,
        {
            "parallel__ep": 2,
            "memory__unshard_async_op": True,
            "memory__sequences_per_gather": 2,
            "train__microbatch_sequences": 1,
        },
    ),
}
OPERATIONS = {
    "all_gather": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
    "all_reduce": "allreduce_",
    "all_to_all": "alltoall_base_",
}

Sent = Counter[tuple[str, tuple[int, ...], int]]
"""How often each operation was started, over which ranks and with how many bytes of this rank."""


def traced(config: RunConfig, rank: int, world_size: int, **options: Any) -> Trace:
    return trace_step(config, rank=rank, world_size=world_size, build=build, train_step=train_step, **options)


class Counted(TorchDispatchMode):
    """Counts collectives by the dispatcher's operations, whoever starts them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            inputs = args[0] if isinstance(args[0], list) else [args[1]]
            (group,) = (dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
            num_bytes = sum(t.numel() * t.element_size() for t in inputs)
            self.sent[name, tuple(dist.get_process_group_ranks(group)), num_bytes] += 1
        return func(*args, **(kwargs or {}))


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


def sent_in_trace(trace: Trace) -> Sent:
    return Counter((OPERATIONS[e.kind], e.ranks, e.bytes_out) for e in trace.events if isinstance(e, Collective))


def real_step(world: World, config: RunConfig) -> tuple[Sent, int, int]:
    """The second step's collectives, and bytes of tensors before it and at the peak.

    The least peak of three steps: gloo's threads sometimes hold a tensor a little longer than its last user.
    """
    recorder, counted = Recorder(), Counted()
    with followed_resizes(recorder), Tracer(recorder, Collectives(recorder), pairs=lambda tokens: 0.0), counted:
        run = build(config, resolve(config, world_size=world.size), world)
        train_step(run, microbatches(run, 0), lr_factor=1.0, tallies=())
        counted.sent.clear()
        gc.collect()
        before = recorder.alive_bytes
        recorder.start()
        for step in (1, 2, 3):
            batches = microbatches(run, step)
            recorder.write(Phase(f"step {step}"))
            train_step(run, batches, lr_factor=1.0, tallies=())
            if step == 1:
                sent = Counter(counted.sent)
    trace = Trace(world.rank, world.size, 0, *recorder.stop())
    return sent, before, min(trace.peak_bytes(during=f"step {step}") for step in (1, 2, 3))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_real_step_sends_and_holds_the_same(mesh: str) -> None:
    """Collectives exactly, by operation, ranks and bytes; tensors' bytes to 1 % of the peak. Traced as on a CPU."""
    num_ranks, chosen = MESHES[mesh]
    config = tiny_config(**REAL | chosen)
    sent, before, peak = run_ranks(num_ranks, real_step, config)[-1]
    trace = traced(config, num_ranks - 1, num_ranks, gpu=False, workload=Workload(document_tokens=SEQ_LEN // 2))
    assert sent_in_trace(trace) == sent
    assert sum(block.num_bytes for block in trace.resident) == pytest.approx(before, rel=0.01)
    assert trace.peak_bytes() == pytest.approx(peak, rel=0.01)


# As on a GPU, without real steps beside it.


def bf16_config(**overrides: Any) -> RunConfig:
    return tiny_config(precision="bf16", **overrides)


@cache
def hsdp_trace(rank: int, expert_load: tuple[float, ...] | None = None) -> Trace:
    """One of four ranks: two replicas, two ranks of expert parallelism, recompute, offload, Muon."""
    config = bf16_config(
        model__num_layers=3,
        train__microbatch_sequences=2,
        memory__recompute="block",
        memory__offload=True,
        memory__unshard_async_op=True,
        parallel__ep=2,
        parallel__dp_replicate=2,
        optim__experts="muon",
        optim__matrices="muon",
    )
    return traced(config, rank, 4, workload=Workload(expert_load=expert_load))


def collectives(trace: Trace) -> list[Collective]:
    return [event for event in trace.events if isinstance(event, Collective)]


def flops_by_phase(trace: Trace) -> Counter[tuple[str, str]]:
    flops: Counter[tuple[str, str]] = Counter()
    phase = Phase("")
    for event in trace.events:
        if isinstance(event, Phase):
            phase = event
        elif isinstance(event, Kernel) and event.flops:
            part = "head" if phase.where == "head" else "blocks"
            flops[phase.name, part] += int(event.flops)
    return flops


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("document_tokens", [None, 12])
def test_flops_are_those_of_the_accounting(document_tokens: int | None, recompute: str) -> None:
    """Exactly. A recompute ends before each group's last products, whose output nothing in backward needs."""
    config = bf16_config(memory__recompute=recompute, train__microbatch_sequences=4)
    trace = traced(config, 0, 1, workload=Workload(document_tokens=document_tokens))
    found = flops_by_phase(trace)

    lengths = [document_tokens] * (SEQ_LEN // document_tokens) if document_tokens else [SEQ_LEN]
    lengths += [SEQ_LEN - sum(lengths)] if sum(lengths) < SEQ_LEN else []
    attention = sum(n * account(config.model, seq_len=n).flops_per_token.full_causal.attention_forward for n in lengths)
    linear = account(config.model, seq_len=SEQ_LEN).flops_per_token.linear_forward
    blocks = (linear.total - linear.head) * SEQ_LEN
    assert trace.tokens == SEQUENCES * SEQ_LEN
    assert found["forward", "head"] == 3 * linear.head * trace.tokens, "the loss makes its gradients in forward"
    assert found["forward", "blocks"] == (blocks + attention) * SEQUENCES
    # The router's gradient is multiplied in two parts.
    split = 2 * linear.router * SEQ_LEN
    assert found["backward", "blocks"] == (2 * blocks + split + 5 * attention // 2) * SEQUENCES
    last_products = (linear.routed_experts + linear.shared_experts) // 3 * SEQ_LEN
    again = blocks + attention - last_products if recompute == "block" else 0
    assert found["recompute", "blocks"] == again * SEQUENCES


def test_rows_travel_while_products_run() -> None:
    """With two chunks and shared experts, whose last product is computed while the last rows travel."""
    config = bf16_config(
        parallel__ep=2,
        parallel__dispatch_chunks=2,
        memory__recompute="block",
        model__moe__num_shared_experts=1,
    )
    under_way: dict[int, tuple[str, float]] = {}
    alone: Counter[str] = Counter()
    together: Counter[str] = Counter()
    phase, started, flops = Phase(""), False, 0.0
    for event in traced(config, 0, 2).events:
        if isinstance(event, Phase):
            phase = event
        elif isinstance(event, Kernel):
            flops += event.flops
        elif isinstance(event, Collective):
            started = event.kind == "all_to_all" and event.stream != COMPUTE and event.dtype == "bfloat16"
        elif isinstance(event, Record) and started:
            under_way[event.event], started = (phase.name, flops), False
        elif isinstance(event, Wait) and event.event in under_way:
            name, before = under_way.pop(event.event)
            (together if flops > before else alone)[name] += 1
    layers = config.model.num_layers
    assert under_way == {}
    assert together + alone == {"forward": 4 * layers, "recompute": 2 * layers, "backward": 4 * layers}
    assert alone == {}


def test_orthogonalization_is_in_its_phase_and_shared_between_owners() -> None:
    """All ranks together do each matrix once: five steps, each of (2S²·L + S²·2S + 2S²·L) FLOP on S × L."""
    flops = Counter[str]()
    for rank in range(4):
        phase = Phase("")
        for event in hsdp_trace(rank).events:
            phase = event if isinstance(event, Phase) else phase
            if isinstance(event, Kernel) and phase.name == "optimizer":
                flops[phase.where] += int(event.flops)
    layers, experts = 3, 8
    sides = [(16, 32)] * 3 * experts + [(32, 32), (16, 32), (16, 32), (32, 32)] + [(16, 32)] * 3
    expected = layers * sum(5 * (4 * s * s * length + 2 * s**3) for s, length in sides)
    assert +flops == {"newton_schulz": expected}


def test_every_rank_starts_the_same_collectives_in_the_same_order() -> None:
    by_rank = [collectives(hsdp_trace(rank)) for rank in range(4)]
    for rank, found in enumerate(by_rank):
        assert all(rank in event.ranks for event in found)
        assert [(e.kind, e.axis, e.dtype, len(e.ranks), e.stream) for e in found] == [
            (e.kind, e.axis, e.dtype, len(e.ranks), e.stream) for e in by_rank[0]
        ]
    for together in zip(*by_rank, strict=True):
        if together[0].kind == "all_to_all":
            assert sum(e.bytes_out for e in together) == sum(e.bytes_in for e in together)
        else:
            assert len({(e.bytes_out, e.bytes_in) for e in together}) == 1
    # Experts lie whole on their ranks here: nothing to gather along efsdp, which has one.
    assert {e.axis for e in by_rank[0]} == {"world", "fsdp", "dp_replicate", "ep"}


def test_a_skewed_load_is_seen_in_what_travels() -> None:
    """Expert 0, on the first of two ranks, gets three times the load of each other."""
    skewed = (3.0, *(1.0,) * 7)

    def rows(rank: int, load: tuple[float, ...] | None) -> tuple[int, int]:
        first = next(e for e in collectives(hsdp_trace(rank, load)) if e.axis == "ep" and e.dtype == "bfloat16")
        return first.bytes_out, first.bytes_in

    all_rows = 2 * SEQ_LEN * 2 * 32 * 2  # sequences, tokens, choices, features, bytes
    for rank in (0, 1):
        assert rows(rank, None) == (all_rows, all_rows)
    # From two ranks, 6 and 4 tenths of the rows, to the nearest row of each expert.
    assert rows(0, skewed) == (all_rows, pytest.approx(1.2 * all_rows, rel=0.01))
    assert rows(1, skewed) == (all_rows, pytest.approx(0.8 * all_rows, rel=0.01))
    busy, idle = (
        sum(e.flops for e in hsdp_trace(rank, skewed).events if isinstance(e, Kernel) and e.name == "_grouped_mm")
        for rank in (0, 1)
    )
    assert busy == pytest.approx(idle * 1.5, rel=0.02)
    again, balanced = (
        sum(e.num_bytes for e in hsdp_trace(0, load).events if isinstance(e, Allocate) and e.memory == "recomputed")
        for load in (skewed, None)
    )
    assert again > balanced


def test_gathers_lie_where_fsdp_puts_them() -> None:
    """The table of FACTS on FSDP2's streams, by default and with unshard_async_op."""
    default, asynchronous = (traced(bf16_config(memory__unshard_async_op=flag), 0, 2) for flag in (False, True))

    def places(trace: Trace) -> set[tuple[str, str]]:
        found = {(e.memory, e.stream) for e in trace.events if isinstance(e, Allocate)}
        return {place for place in found if place[0] in ("communication", "gathered", "gradients")}

    both = {
        ("gathered", COMPUTE),
        ("communication", COMPUTE),  # inputs of reduce-scatters
        ("gradients", COMPUTE),
        ("gradients", "reduce_scatter"),
    }
    assert places(default) == both | {("communication", "all_gather_copy_in")}
    assert places(asynchronous) == both

    def streams(trace: Trace, kind: str) -> set[tuple[str, str]]:
        return {(e.stream, e.issued_from) for e in collectives(trace) if e.kind == kind}

    # By default backward's gathers, too, go over FSDP's streams.
    assert streams(default, "all_gather") == {("all_gather", "all_gather")}
    assert streams(asynchronous, "all_gather") == {("async fsdp", COMPUTE)}
    for trace in (default, asynchronous):
        assert streams(trace, "reduce_scatter") == {("reduce_scatter", "reduce_scatter")}


def test_no_tensor_is_larger_than_this_rank_holds() -> None:
    """DTensor learns shapes of summed expert gradients from imagined whole ones, which are neither memory nor work."""
    config = tiny_config(
        precision="bf16",
        model__moe__expert_hidden_size=512,
        parallel__ep=4,
        memory__sequences_per_gather=2,
        train__microbatch_sequences=1,
    )
    trace = traced(config, 0, 4)
    of_rank = 2 * 8 * 512 * 32 // 4
    assert max(event.num_bytes for event in trace.events if isinstance(event, Allocate)) <= 3 * 2 * of_rank
    summed = [e for e in trace.events if isinstance(e, Kernel) and e.name == "add" and e.bytes_moved > 2 * of_rank]
    assert {event.bytes_moved for event in summed} == {3 * of_rank}


@pytest.mark.parametrize("rank", [0, 3])
def test_a_trace_is_consistent(rank: int) -> None:
    """Waits come after their record, blocks are freed once, what is resident stays, phases follow each other."""
    trace = hsdp_trace(rank)
    recorded: set[int] = set()
    alive = {block.block for block in trace.resident}
    before = set(alive)
    for event in trace.events:
        if isinstance(event, Record):
            assert event.event not in recorded
            recorded.add(event.event)
        elif isinstance(event, Wait | Synchronize):
            assert event.event in recorded
        elif isinstance(event, Allocate):
            assert event.block not in alive
            assert event.num_bytes > 0
            alive.add(event.block)
        elif isinstance(event, Free):
            alive.remove(event.block)
    assert alive == before
    phases = [event for event in trace.events if isinstance(event, Phase)]
    assert {p.where for p in phases if p.name == "recompute"} == {f"blocks.{layer}" for layer in range(3)}
    names = list(dict.fromkeys(phase.name for phase in phases))
    assert names == ["forward", "backward", "recompute", "optimizer"]


def test_boundaries_travel_on_their_own_streams() -> None:
    """All but the last group's, each way, while a host arena of the same size is held."""
    trace = hsdp_trace(0)
    copies = [e for e in trace.events if isinstance(e, Copy) and e.stream != COMPUTE]
    boundary = 2 * SEQ_LEN * 32 * 2
    assert Counter(copies) == {
        Copy("to_host", boundary, "to_host"): 2,
        Copy("to_device", boundary, "to_device"): 2,
    }
    assert [e.num_bytes for e in trace.events if isinstance(e, HostMemory)] == [2 * boundary]
    landings = [block for block in trace.resident if block.memory == "boundaries"]
    assert [block.num_bytes for block in landings] == [boundary] * 2
    waited = {event.event for event in trace.events if isinstance(event, Wait) and event.stream == COMPUTE}
    done = [e.event for e in trace.events if isinstance(e, Record) and e.stream in ("to_host", "to_device")]
    assert set(done) <= waited


def test_the_state_is_that_of_the_accounting() -> None:
    """Over all ranks: fp32 parameters and AdamW's and Muon's state, and AdamW's count of steps on each rank."""
    config = bf16_config(optim__experts="muon", optim__matrices="muon", train__microbatch_sequences=4)
    state = account(config.model, seq_len=SEQ_LEN, optim=config.optim).state_bytes
    shapes = parameter_shapes(config.model)
    held: Counter[str] = Counter()
    for rank in range(2):
        for block in traced(config, rank, 2).resident:
            held[block.memory] += block.num_bytes
    num_steps = 2 * sum("embed" in name or "norm" in name or "router" in name or "head" in name for name, _ in shapes)
    assert held["parameters"] == state.parameters_fp32
    assert held["optimizer"] == state.muon_momentum_fp32 + state.adamw_moments_fp32 + 4 * num_steps


def test_a_model_of_terabytes_is_traced_in_nothing() -> None:
    """Two layers of the reference model, as the last of 1,536 ranks: 60 GiB at its peak, and none of it here."""
    reference = europa_1t()
    model = reference.model.model_copy(update={"num_layers": 2})
    config = reference.model_copy(update={"model": model})
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = traced(config, 1535, 1536, workload=Workload(document_tokens=8192))
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024
    assert trace.peak_bytes() > 50 * 2**30
    assert grown_bytes < 2**29
    assert trace.tokens == 65_536


def test_cost_is_flat_in_ranks_and_linear_in_layers() -> None:
    """By the number of events: the same on any number of ranks, the same more with every layer."""

    def events(num_ranks: int, num_layers: int) -> int:
        config = bf16_config(
            model__num_layers=num_layers,
            train__global_batch_tokens=num_ranks * SEQ_LEN,
            train__microbatch_sequences=1,
            parallel__ep=2,
        )
        return len(traced(config, num_ranks - 1, num_ranks).events)

    two, three, four = (events(4, layers) for layers in (2, 3, 4))
    assert three - two == four - three > 0
    assert events(8, 3) == three


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload(document_tokens=0), "document_tokens is 0; give 1 token or more"),
        (Workload(expert_load=(1.0,) * 7), "expert_load has 7 entries; give one for each of the 8 experts"),
        (Workload(expert_load=(-1.0, *(1.0,) * 7)), "expert_load has a negative entry"),
        (Workload(expert_load=(9.0, *(1.0,) * 7)), "expert_load gives one expert 0.562 of all choices"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(workload: Workload, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        traced(tiny_config(), 0, 1, workload=workload)


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank is 2, but the ranks of this run are 0 to 1"):
        traced(tiny_config(), 2, 2)


def trace_inside(world: World, config: RunConfig) -> str:
    with pytest.raises(RuntimeError) as caught:
        traced(config, 0, 2)
    return str(caught.value)


def test_a_process_that_trains_is_left_alone() -> None:
    (message,) = run_ranks(1, trace_inside, tiny_config())
    assert "a trace needs a process without a process group" in message


def test_rows_are_whole_and_sum_to_all() -> None:
    workload = Workload(expert_load=(0.5, 0.3, 0.15, 0.05))
    for tokens in (1, 7, 64):
        rows = workload.rows_by_expert(tokens, num_experts=4, top_k=2)
        assert sum(rows) == 2 * tokens
        assert all(
            abs(found - 2 * tokens * share) < 1 for found, share in zip(rows, workload.expert_load or (), strict=True)
        )
    rows = workload.rows_by_expert(64, num_experts=4, top_k=2)
    assert flat_splits(rows, ep=2, ep_rank=1) == [[102, 26], [26, 26]]


def test_tokens_cross_to_a_node_once() -> None:
    """Against counting: choices drawn at random, without replacement."""
    experts, top_k, tokens = 16, 4, 20_000
    torch.manual_seed(0)
    chosen = torch.rand(tokens, experts).topk(top_k).indices
    rows = Workload().rows_by_expert(tokens, num_experts=experts, top_k=top_k)
    found = rows_by_node(rows, num_tokens=tokens, num_nodes=4, top_k=top_k, is_balanced=True)
    for node, expected in enumerate(found):
        assert int((chosen // 4 == node).any(dim=1).sum()) == pytest.approx(expected, rel=0.02)
    assert rows_by_node([20, 12, 4, 4], num_tokens=20, num_nodes=2, top_k=2, is_balanced=False) == [20, 7]
    across, inside = node_splits([5, 7], [4, 4, 6, 10], node_ranks=2, ep_rank=3)
    assert across == [[5, 7], [7, 7]]
    assert inside == [[12, 20], [20, 20]]
