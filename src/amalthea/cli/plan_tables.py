"""The tables of `amalthea plan`: exact counts, and the plan of a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from amalthea.cli.console import copyable, table
from amalthea.core.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from amalthea.plan.accounting import Accounting
    from amalthea.plan.run_plan import RunPlan


def count_tables(counted: Accounting) -> list[Table]:
    """Parameters, FLOP and bytes, exactly."""
    return [_parameters(counted), _flops(counted), _state(counted)]


def run_tables(plan: RunPlan, document: dict[str, Any]) -> list[Any]:
    """What `document`, the plan's JSON, says of a run, for people."""
    return [
        _headline(plan, document),
        *_remedies(document["memory"]),
        _step(plan, document["timeline"]),
        _exposed(document["timeline"]),
        _memory(document["memory"]),
        _budget(document["budget"]),
        *([_weights(plan)] if plan.sensitivities else []),
        lines("warnings", document["warnings"]),
        lines("assumptions", [*document["timeline"]["assumptions"], *document["memory"]["assumptions"]]),
    ]


def facts(title: str) -> Table:
    """A name, a figure, a remark."""
    made = table(title, "", "", "")
    made.show_header = False
    made.columns[0].no_wrap = made.columns[1].no_wrap = True
    made.columns[2].justify = "left"
    return made


def lines(title: str, found: Sequence[str]) -> Text:
    """A list under a heading."""
    text = Text(title, style="bold")
    return text.append("".join(f"\n· {line}" for line in found or ("none",)), style="not bold")


def _headline(plan: RunPlan, document: dict[str, Any]) -> Table:
    layout, timeline, memory = document["layout"], document["timeline"], document["memory"]
    made = facts(f"{document['recipe']} on {layout['gpus']:,} GPUs of {layout['cluster']}, rank {layout['rank']}")
    degrees = f"replicas {layout['dp_replicate']} · dp_shard {layout['dp_shard']} · cp {layout['cp']}"
    made.add_row("layout", f"ep {layout['ep']}", f"{degrees}; efsdp {layout['efsdp']}")
    made.add_row("tokens per GPU and step", f"{layout['tokens_per_gpu']:,}", _levers(layout))
    made.add_row("tokens/s per GPU", f"{timeline['tokens_per_s_per_gpu']:,.0f}", "simulation", style="bold")
    made.add_row("MFU, HFU", f"{timeline['mfu']:.1%}", f"{timeline['hfu']:.1%} with what is recomputed")
    verdict = "yes" if memory["fits"] else "no"
    made.add_row("fits", verdict, "; ".join(memory["problems"]), style="" if memory["fits"] else "bold red")
    return made


def _remedies(memory: dict[str, Any]) -> list[Text]:
    found = [shlex.join(overrides) for overrides in memory["would_fit"]]
    return [copyable("would fit, by a lower bound; overrides to add", found)] if found else []


def _levers(layout: dict[str, Any]) -> str:
    found = [f"recompute {layout['recompute']}", f"{layout['blocks_per_group']} blocks per group"]
    found.append(f"{layout['sequences_per_gather']} passes per gather")
    switches = ("offload", "offload_optimizer", "offload_parameters", "unshard_async_op")
    found += [name for name in switches if layout[name]]
    return ", ".join(found)


def _step(plan: RunPlan, timeline: dict[str, Any]) -> Table:
    made = facts("one step (simulation)")
    made.add_row("step", _seconds(timeline["step_s"]), timeline["leans_on"]["assumption"], style="bold")
    made.add_row("  leans on it", "", timeline["leans_on"]["sensitivity"])
    made.add_row("computing", _seconds(timeline["compute_s"]), "kernels on the computing stream")
    kinds = {name: use["busy_s"] for name, use in timeline["kinds"].items()}
    for name in ("matmul", "grouped", "attention", "memory", "newton_schulz"):
        if kinds.get(name):
            made.add_row(f"  {name.replace('_', ' ')}", _seconds(kinds[name]), _KERNELS[name])
    made.add_row("exposed communication", _seconds(timeline["exposed_comm_s"]), "nothing computes meanwhile")
    made.add_row("idle", _seconds(timeline["idle_s"]), "the device waits for the processor")
    other = plan.optimizer_estimate.step_s
    made.add_row("optimizer step", _seconds(plan.timeline.optimizer_s), f"of the step; by formula {_seconds(other)}")
    return made


_KERNELS = {
    "matmul": "dense products",
    "grouped": "products with experts",
    "attention": "attention inside documents",
    "memory": "element-wise kernels, moving bytes",
    "newton_schulz": "the optimizer's products",
}


def _exposed(timeline: dict[str, Any]) -> Table:
    made = table("what is sent and copied (simulation)", "kind", "busy", "exposed")
    for name, use in timeline["kinds"].items():
        if name not in _KERNELS and use["busy_s"] >= 0.001:
            made.add_row(name, _seconds(use["busy_s"]), _seconds(use["exposed_s"]))
    return made


def _memory(memory: dict[str, Any]) -> Table:
    made = facts("memory of this rank (simulation)")
    made.add_row("allocated, peak", _gib(memory["allocated_gib"]), f"in {memory['peak_moment']}", style="bold")
    for name, value in sorted(memory["by_class_gib"].items(), key=lambda pair: -pair[1]):
        made.add_row(f"  {name}", _gib(value))
    made.add_row("reserved, peak", _gib(memory["reserved_gib"]), f"in {memory['reserved_peak_moment']}", style="bold")
    for stream, value in memory["stranded_by_stream_gib"].items():
        if value >= 0.1:
            made.add_row(f"  stranded, {stream}", _gib(value))
    made.add_row("may be reserved", _gib(memory["cap_gib"]), memory["assumptions"][0])
    made.add_row("retries", f"{memory['retries']}", "of the allocator, in a step")
    segments = "without" if memory["expandable_segments"] else "with"
    made.add_row(
        "reserved otherwise", _gib(memory["reserved_gib_other_allocator"]), f"{segments} expandable segments, no cap"
    )
    made.add_row("host memory", _gib(memory["host_gib"]), f"of {memory['host_cap_gib']:.1f} GiB for a rank")
    made.add_row("leans on", "", f"{memory['leans_on']['assumption']}: {memory['leans_on']['sensitivity']}")
    return made


def _budget(found: dict[str, Any]) -> Table:
    made = facts(f"{format_count(found['tokens'])} tokens (estimate)")
    made.add_row("steps", f"{found['steps']:,}")
    made.add_row("GPU hours", f"{found['gpu_hours']:,.0f}")
    made.add_row("wall clock", format_duration(found["wall_clock_h"] * 3600), f"in {found['jobs']:,} jobs")
    made.add_row("checkpoints", f"{found['saves']:,}", f"{found['save_s']:.2f} s each; {_gib(found['checkpoint_gib'])}")
    if found["energy_mwh"] is not None:
        made.add_row("energy", f"{found['energy_mwh']:,.0f} MWh", found["assumptions"][-1])
    return made


def _weights(plan: RunPlan) -> Table:
    made = table("what the step leans on", "assumption", "value", "a tenth lower", "a tenth higher")
    for one in plan.sensitivities[:5]:
        made.add_row(one.assumption, f"{one.value:g}", _seconds(one.step_s_lower), _seconds(one.step_s_higher))
    return made


def _gib(value: float) -> str:
    return f"{value:,.2f} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _parameters(counted: Accounting) -> Table:
    made = table("parameters", "part", "exact", "")
    parts = counted.to_json()["params_by_part"]
    rows = {name.replace("_", " "): count for name, count in parts.items() if count}
    rows |= {
        "total": counted.total_params,
        "active per token": counted.active_params,
        "active, input embedding left out": counted.active_params_without_embedding,
    }
    _add_counts(made, rows)
    return made


def _flops(counted: Accounting) -> Table:
    flops = counted.flops_per_token
    made = table("FLOP per token", "part", "exact", "")
    linear = counted.to_json()["flops_per_token"]["linear_forward"]
    rows = {f"forward, {name.replace('_', ' ')}": count for name, count in linear.items() if count}
    rows["forward, all linear"] = flops.linear_forward.total
    for context in (flops.full_causal, flops.documents):
        if context is not None:
            of = f"documents of {context.context_tokens:,}"
            rows[f"forward, attention over {of}"] = context.attention_forward
            rows[f"forward and backward, {of}"] = context.model_total
            rows[f"the same with full recompute, {of}"] = context.full_recompute_total
    _add_counts(made, rows)
    return made


def _state(counted: Accounting) -> Table:
    made = table("state of one replica (estimate)", "part", "bytes", "")
    for name, num_bytes in counted.to_json()["state_bytes"].items():
        made.add_row(name.replace("_", " "), f"{num_bytes:,}", format_bytes(num_bytes))
    return made


def _add_counts(made: Table, rows: dict[str, int]) -> None:
    for name, count in rows.items():
        made.add_row(name, f"{count:,}", format_count(count))
