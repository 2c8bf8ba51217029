"""The tables of `amalthea plan --optimizer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from amalthea.cli.console import table
from amalthea.core.units import format_bytes, format_count, format_duration, format_si

if TYPE_CHECKING:
    from amalthea.plan.optimizer_published import Published
    from amalthea.plan.optimizer_step import OptimizerPlan
    from amalthea.plan.optimizer_time import StepEstimate


def optimizer_tables(plan: OptimizerPlan, estimate: StepEstimate, published: Sequence[Published]) -> list[Any]:
    """What the JSON says, for people: who takes what, the plan, the seconds, what they assume."""
    tables: list[Any] = [_groups(plan), _plan(plan), _step(estimate)]
    if published:
        tables.append(_published(published))
    return [*tables, _assumptions(estimate.assumptions)]


def _groups(plan: OptimizerPlan) -> Table:
    """Muon first. Matrices that fall to AdamW have headings of their own."""
    made = table("who takes what", "parameters", "shape", "tensors", "elements", "units")
    heading = ""
    for group in sorted(plan.groups, key=lambda group: (group.optimizer != "muon", group.reason)):
        name = {"muon": "Muon", "adamw": "AdamW"}[group.optimizer]
        kind = f", a matrix ({group.reason})" if len(group.shape) > 1 and group.optimizer == "adamw" else ""
        of = f"{name}{kind or f' ({group.reason})'}"
        if of != heading:
            made.add_row(heading := of, style="bold")
        made.add_row(
            f"  {group.pattern.removesuffix('.weight')}",
            "×".join(map(str, group.shape)),
            f"{group.tensors:,}",
            format_count(group.params),
            f"{group.units:,}" if group.units else "",
        )
    return made


def _plan(plan: OptimizerPlan) -> Table:
    figures, grid = plan.to_json(), plan.grid
    made = _facts(f"optimizer step of {plan.num_gpus:,} GPUs")
    replicas = {"owning": "each unit has one owning replica", "repeated": "all repeat the work", "one": ""}
    made.add_row("replicas", f"{grid.num_replicas:,}", replicas[figures["replicas"]])
    made.add_row("ranks of each", f"{grid.num_ranks:,}", f"ep {grid.ep} × efsdp {grid.efsdp}")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in figures["units_by_kind"].items() if count)
    made.add_row("experts stored", plan.experts, plan.storage)
    made.add_row("units", f"{figures['units']:,}", kinds)
    made.add_row("  local", f"{figures['units_local']:,}", "lie whole with their owner")
    made.add_row("  routed", f"{figures['units_routed']:,}", "travel to their owner and back")
    made.add_row("owners", f"{figures['owners']:,}", "ranks with units of their own")
    made.add_row("imbalance", f"{figures['imbalance']:.3f}", "busiest over max(mean, largest unit)")
    busiest, mean = (format_si(figures["flops"][of], "FLOP") for of in ("busiest", "mean"))
    made.add_row("Newton-Schulz", busiest, f"busiest; mean {mean}")
    made.add_row("sent per rank", format_bytes(figures["bytes_sent"]), _mean(figures, "bytes_sent"))
    _add_bytes(made, figures["bytes_sent_by_part"])
    by_kind = ", ".join(f"{number} {kind}" for kind, number in figures["collectives_by_kind"].items() if number)
    made.add_row("collectives", f"{figures['collectives']:,}", by_kind)
    made.add_row("scratch", format_bytes(figures["scratch_bytes"]), "of the owner that needs most (estimate)")
    _add_bytes(made, figures["scratch_bytes_by_part"])
    made.add_row("momentum", format_bytes(figures["momentum_bytes"]), _mean(figures, "momentum_bytes"))
    return made


def _step(estimate: StepEstimate) -> Table:
    made = _facts(f"step on {estimate.cluster.name} (estimate)")
    for part in estimate.parts:
        if part.seconds:
            made.add_row(_words(part.name), _seconds(part.seconds), part.basis)
    if estimate.hidden_s:
        made.add_row("beside local units", f"-{_seconds(estimate.hidden_s)}")
    made.add_row("step", _seconds(estimate.step_s), style="bold")
    if estimate.without_replicas_s != estimate.step_s:
        made.add_row(
            "  less replicas", _seconds(estimate.without_replicas_s), "what a step would be that left them to backward"
        )
    if estimate.backward_all_reduce_s:
        made.add_row(
            "all-reduce", _seconds(estimate.backward_all_reduce_s), "over replicas, in backward, not in the step"
        )
    return made


def _published(published: Sequence[Published]) -> Table:
    made = _facts("the reference run's published step, by the same estimate")
    for figure in published:
        made.add_row(f"{figure.published_s:g} s published", _seconds(figure.estimated_s), figure.name, style="bold")
        for part in figure.parts:
            made.add_row(f"  {_words(part.name)}", _seconds(part.seconds), part.basis)
        made.add_row("  estimate / published", f"{figure.ratio:.2f}", f"read as {figure.reading}")
    return made


def _assumptions(lines: Sequence[str]) -> Text:
    return Text("what the estimate assumes", style="bold").append(
        "".join(f"\n· {line}" for line in lines), style="not bold"
    )


def _facts(title: str) -> Table:
    """A name, a figure, a remark."""
    made = table(title, "", "", "")
    made.show_header = False
    made.columns[0].no_wrap = made.columns[1].no_wrap = True
    made.columns[2].justify = "left"
    return made


def _add_bytes(made: Table, parts: dict[str, int]) -> None:
    for part, num_bytes in parts.items():
        made.add_row(f"  {_words(part)}", format_bytes(num_bytes))


def _mean(figures: dict[str, Any], name: str) -> str:
    return f"most; mean {format_bytes(figures[f'{name}_mean'])}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _seconds(seconds: float) -> str:
    """Three digits at least, so that a short part is not rounded away."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 60 else format_duration(seconds)
