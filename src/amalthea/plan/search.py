"""Looks for faster layouts that fit: many by arithmetic, a few of them traced.

First every combination of degrees and levers is held against a bound of memory (`plan/fits.py`, and what a group's
backward takes beside it) and given a rough time by formula; then the best of each kind are sketched from real traces
(`plan/sketch.py`); last, one lever after the other is changed on the best so far, and stays changed where that is
faster and fits. What does not fit is kept, with the reason.

Letters: E experts, D hidden, T tokens of a rank and step, L layers.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from amalthea.config.check import ResolvedRun, resolve
from amalthea.config.load import flatten
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.units import GIB
from amalthea.memory.estimate import block_bytes
from amalthea.plan.accounting import BF16_BYTES, FP32_BYTES, account
from amalthea.plan.devices import device_cap_gib, host_cap_bytes
from amalthea.plan.fits import Floor, memory_floor, width_bytes
from amalthea.plan.setting import Code, Setting
from amalthea.plan.sketch import Sketch, sketch

MAX_EP, MAX_REPLICAS, MAX_BATCHES = 64, 16, 2
"""Bounds of what is tried; batches are multiples of the recipe's."""
TRACED = 7
"""Layouts that are traced beside the recipe's own, the best by formula of each kind; then changes of the best are."""
LOSS_BUDGET_GIB = 8.0
"""Of logits: at the loss, at the end of forward, nothing of a block is held but boundaries."""
SHARE_OF_PEAK = 0.5
"""For the formula only: what whole steps compute at, of the bf16 peak."""


@dataclass(frozen=True)
class Candidate:
    """A layout, by overrides on the recipe; `sketch` where it was traced."""

    config: RunConfig
    overrides: tuple[str, ...]
    rough_s_per_token: float
    """By formula."""
    sketch: Sketch | None = None
    problem: str | None = None

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return 1 / self.rough_s_per_token if self.sketch is None else self.sketch.tokens_per_s_per_gpu

    def to_json(self) -> dict[str, Any]:
        return {
            "overrides": list(self.overrides),
            "problem": self.problem,
            **({"figures_are": "estimate"} if self.sketch is None else self.sketch.to_json()),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
        }


@dataclass(frozen=True)
class Search:
    """`ranked` were traced and fit, the fastest first; `infeasible` were traced or refused by the bound."""

    ranked: tuple[Candidate, ...]
    infeasible: tuple[Candidate, ...]
    """Traced ones, the fastest first."""
    num_considered: int
    refused: dict[str, int]
    """How many combinations each reason ruled out before any trace."""

    @property
    def best(self) -> Candidate | None:
        return self.ranked[0] if self.ranked else None

    def limits(self) -> tuple[str, ...]:
        """What holds the best back, in words."""
        if self.best is None or self.best.sketch is None:
            return ("no layout fits",)
        return limits(self.best.sketch)

    def to_json(self) -> dict[str, Any]:
        return {
            "ranked": [one.to_json() for one in self.ranked],
            "infeasible": [one.to_json() for one in self.infeasible],
            "num_considered": self.num_considered,
            "refused": self.refused,
            "limits": list(self.limits()),
        }


def limits(found: Sketch) -> tuple[str, ...]:
    """What a step is made of, and what it could at best be."""
    exposed = sorted(found.exposed_s.items(), key=lambda pair: -pair[1])[:3]
    kernels = {
        name: found.busy_s[name] for name in ("grouped", "memory", "matmul", "attention") if name in found.busy_s
    }
    return (
        f"computing takes {found.compute_s:.1f} of {found.step_s:.1f} s: with all else hidden "
        f"{found.tokens / found.compute_s:,.0f} tokens/s/GPU",
        "computing is " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in kernels.items()),
        "exposed are " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in exposed),
    )


def search(
    config: RunConfig, setting: Setting, code: Code, *, say: Callable[[str], None] = lambda text: None
) -> Search:
    """Finds layouts of `config` on `setting`.

    Communication: none. Time: at most 22 sketches, some minutes of one core for a trillion parameters; `say` is told
    before each.
    """
    say("search bounds by arithmetic")
    candidates, refused = _bounded(config, setting)
    own = Candidate(config, (), math.inf)
    chosen = [own, *_best_of_each_kind(candidates, TRACED)]
    tried: dict[tuple[str, ...], Candidate] = {}
    for number, candidate in enumerate(chosen, 1):
        say(f"search {number} of {len(chosen)}: {' '.join(candidate.overrides)}")
        tried[candidate.overrides] = _try(candidate, setting, code)
    best = _fastest(tried.values())
    for number in range(0 if best is None else len(_levers(best.config, setting))):
        assert best is not None
        changed = _changed(best.config, **_levers(best.config, setting)[number])
        candidate = Candidate(changed, overrides_of(config, changed), best.rough_s_per_token)
        if candidate.overrides not in tried:
            say(f"search beside the best, lever {number + 1}: {' '.join(candidate.overrides)}")
            tried[candidate.overrides] = _try(candidate, setting, code)
            best = _fastest((best, tried[candidate.overrides]))
    found = sorted(tried.values(), key=lambda one: -one.tokens_per_s_per_gpu)
    return Search(
        ranked=tuple(one for one in found if one.problem is None),
        infeasible=tuple(one for one in found if one.problem is not None),
        num_considered=len(candidates) + sum(refused.values()),
        refused=dict(refused),
    )


def combinations(config: RunConfig, setting: Setting) -> Iterator[RunConfig]:
    """Every combination of degrees that is looked at; many contradict themselves and are refused later.

    Recompute is by group and gathers are asynchronous: the rest is tried beside the best.
    """
    gpus, per_node, parallel = setting.num_gpus, setting.cluster.gpus_per_node, config.parallel
    eps = _degrees(MAX_EP, parallel.ep, config.model.moe.num_experts)
    replicas = _degrees(MAX_REPLICAS, parallel.dp_replicate, gpus)
    cps = sorted({1, parallel.cp, per_node})
    dtypes = dict.fromkeys((parallel.reduce_dtype, "bf16"))
    # Boundaries that the host has no room for stay on the device.
    budget_gib = math.floor(host_cap_bytes(setting.cluster, setting.reserves) / GIB)
    for ep, replica, cp, dtype, batches in product(eps, replicas, cps, dtypes, range(1, MAX_BATCHES + 1)):
        batch = batches * config.train.global_batch_tokens
        sequences = batch // config.data.seq_len * cp // gpus
        dispatches = ("flat", "hierarchical") if ep > per_node and ep % per_node == 0 else ("flat",)
        for dispatch, passes, per_group, (offload, budget) in product(
            dispatches, dict.fromkeys((1, max(1, sequences))), (1, 2), ((True, None), (True, budget_gib), (False, None))
        ):
            yield _changed(
                config,
                parallel={
                    "dp_replicate": replica,
                    "dp_shard": "auto",
                    "ep": ep,
                    "cp": cp,
                    "reduce_dtype": dtype,
                    # Inside a node there is one way for tokens to travel.
                    **({"dispatch": dispatch, "ranks_per_node": per_node} if len(dispatches) > 1 else {}),
                },
                memory={
                    "recompute": "block",
                    "blocks_per_group": per_group,
                    "sequences_per_gather": passes,
                    "offload": offload,
                    "offload_budget_gib": budget,
                    "unshard_async_op": True,
                },
                train={"microbatch_sequences": 1, "global_batch_tokens": batch},
            )


def _degrees(limit: int, own: int, whole: int) -> list[int]:
    """Powers of two up to a limit that divide `whole`, and the recipe's own."""
    powers = {2**n for n in range(limit.bit_length()) if whole % 2**n == 0}
    return sorted({degree for degree in powers if degree <= limit} | {own})


def _changed(config: RunConfig, **changes: Any) -> RunConfig:
    """Components by the values to change in them, or whole values.

    Without validation, which thousands of combinations would wait for; `resolve` checks what may contradict.
    """
    changed = {
        name: getattr(config, name).model_copy(update=values) if isinstance(values, dict) else values
        for name, values in changes.items()
    }
    return config.model_copy(update=changed)


def overrides_of(config: RunConfig, changed: RunConfig) -> tuple[str, ...]:
    """What turns `config` into `changed`, to paste behind `amalthea train RECIPE`."""
    before, after = flatten(config), flatten(changed)
    return tuple(f"{key}={_typed(value)}" for key, value in after.items() if before.get(key) != value)


def _typed(value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value), separators=(",", ":"))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _bounded(config: RunConfig, setting: Setting) -> tuple[list[Candidate], Counter[str]]:
    """Those that the bound lets pass, the fastest by formula first; and why the others do not."""
    room = int(device_cap_gib(setting.cluster, setting.reserves) * GIB)
    host = host_cap_bytes(setting.cluster, setting.reserves)
    work = account(config.model, seq_len=config.data.seq_len, document_len=setting.workload.document_tokens)
    refused: Counter[str] = Counter()
    passed = []
    for changed in combinations(config, setting):
        try:
            resolved = resolve(changed, world_size=setting.num_gpus)
        except ConfigError:
            refused["degrees contradict each other"] += 1
            continue
        floor = memory_floor(changed, resolved)
        needed = floor.by_class | rough_bytes(changed, resolved, floor)
        if sum(needed.values()) > room:
            refused[f"device memory, most of it {max(needed, key=lambda n: needed[n])}"] += 1
        elif floor.host > host:
            refused["host memory"] += 1
        else:
            rough = rough_s_per_token(changed, resolved, setting, work)
            passed.append(Candidate(changed, overrides_of(config, changed), rough))
    return sorted(passed, key=lambda one: (one.rough_s_per_token, len(one.overrides))), refused


def rough_bytes(config: RunConfig, resolved: ResolvedRun, floor: Floor) -> dict[str, int]:
    """What the backward of a group of blocks takes beyond the bound, by formula, to choose what to trace.

    The next group's parameters, this one's gradients before they are reduced, and what is recomputed, with half as much
    of its gradients.
    """
    per_group, model = config.memory.blocks_per_group, config.model
    tokens = resolved.pass_tokens(config.data.seq_len)
    # The formula of `memory/estimate.py` counts fp32.
    recomputed = block_bytes(model, is_dense=False) * width_bytes(config) // FP32_BYTES * tokens * per_group * 3 // 2
    return {"gathered": 3 * floor.gathered, "recomputed": recomputed}


def rough_s_per_token(config: RunConfig, resolved: ResolvedRun, setting: Setting, work: Any) -> float:
    """Computing, or gathers where these take longer, and dispatch. An *estimate*, to choose what to trace."""
    flops = work.flops_per_token.documents or work.flops_per_token.full_causal
    cluster, model = setting.cluster, config.model
    rate = cluster.inter_bytes_per_s * setting.assumptions.network
    tokens = resolved.rank_tokens(config.data.seq_len)
    compute_s = flops.full_recompute_total * tokens / (cluster.peak_flops_per_s * SHARE_OF_PEAK)
    together = max(1, cluster.gpus_per_node // resolved.ep)
    width = BF16_BYTES if config.parallel.reduce_dtype == "bf16" else FP32_BYTES
    gathered = work.params_by_part.routed_experts / resolved.ep * (2 * BF16_BYTES + width)
    gather_s = gathered / together / rate * resolved.accumulation_steps if resolved.efsdp > 1 else 0.0
    rows = tokens * model.num_layers * model.hidden_size * BF16_BYTES * 6
    nodes = -(-resolved.ep // cluster.gpus_per_node)
    visited = nodes * (1 - (1 - 1 / nodes) ** model.moe.top_k)
    copies = visited if config.parallel.dispatch == "hierarchical" else model.moe.top_k
    away_s = rows * copies * (1 - 1 / nodes) / rate
    near_s = rows * model.moe.top_k * (resolved.ep > 1) / (cluster.intra_bytes_per_s * setting.assumptions.intra_node)
    return (max(compute_s, gather_s) + away_s + near_s) / tokens


def _best_of_each_kind(candidates: list[Candidate], number: int) -> list[Candidate]:
    first: dict[tuple[Any, ...], Candidate] = {}
    for candidate in candidates:
        of, memory = candidate.config, candidate.config.memory
        batch, cut = of.train.global_batch_tokens, of.parallel.cp
        kind = (of.parallel.ep, cut, batch, memory.sequences_per_gather, memory.blocks_per_group)
        first.setdefault(kind, candidate)
    return list(first.values())[:number]


def _levers(config: RunConfig, setting: Setting) -> list[dict[str, Any]]:
    """What may be changed of a layout, one at a time, in the order in which it is tried; as many for every layout.

    First what costs no memory, then what trades memory for time.
    """
    memory, parallel = config.memory, config.parallel
    passes = memory.sequences_per_gather
    together: dict[str, Any] = {}
    if passes % 2 == 0:
        # Half as many passes, each twice as large, so that chunks of them are as large as passes were.
        microbatch = 2 * config.train.microbatch_sequences
        together = {"train": {"microbatch_sequences": microbatch}, "memory": {"sequences_per_gather": passes // 2}}
    chunks = {"dispatch_chunks": 2} if parallel.ep > 1 else {}
    return [
        {"flash_attention": "fa3"} if setting.cluster.is_hopper else {},
        {"memory": {"loss_budget_gib": LOSS_BUDGET_GIB}},
        {"parallel": {"dp_replicate": max(1, parallel.dp_replicate // 2)}},
        {"parallel": chunks},
        together | {"parallel": chunks},
        {"memory": {"offload_optimizer": not memory.offload_optimizer}},
        {"memory": {"recompute": "selective", "keep": ("attention",)}},
        {"memory": {"recompute": "selective", "keep": ("all_to_all",)}},
        {"memory": {"blocks_per_group": 1 if memory.blocks_per_group > 1 else 2}},
        {"memory": {"unshard_async_op": False}},
        {"memory": {"offload": not memory.offload, "offload_budget_gib": None}},
        {"parallel": {"reduce_dtype": "fp32" if parallel.reduce_dtype == "bf16" else "bf16"}},
        {"parallel": {"reshard_after_forward": not parallel.reshard_after_forward}},
    ]


def _fastest(tried: Iterable[Candidate]) -> Candidate | None:
    fitting = [one for one in tried if one.problem is None]
    return max(fitting, key=lambda one: one.tokens_per_s_per_gpu, default=None)


def _try(candidate: Candidate, setting: Setting, code: Code) -> Candidate:
    try:
        drawn = sketch(candidate.config, setting, code)
    except ConfigError as error:
        return replace(candidate, problem=str(error))
    return replace(candidate, sketch=drawn, problem=drawn.problem)
