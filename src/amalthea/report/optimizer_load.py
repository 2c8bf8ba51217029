"""A picture of an optimizer plan: what every rank orthogonalizes, beside the mean and the bound; and what it sends.

Ranks stand in order of load, so that both ends and the evenness between them are seen at any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import MaxNLocator

from amalthea.core.errors import ConfigError
from amalthea.plan.optimizer_step import OptimizerPlan
from amalthea.report.plots import BLUE, DPI, GRID, INK, ORANGE, PALE, SKY, SOFT, WIDTH_IN

_TITLE_IN = 0.72
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def write_load_picture(plan: OptimizerPlan, path: Path, *, title: str, flops_per_s: float) -> None:
    """Writes a PNG of 1200 pixels' width to `path`, aside first.

    `flops_per_s` turns FLOP into milliseconds on the right-hand axis. Raises ConfigError where it cannot be written.
    """
    figure = draw_load(plan, title=title, flops_per_s=flops_per_s)
    aside = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(aside, format="png")
        os.replace(aside, path)
    except OSError as error:
        raise ConfigError(f"--picture {path} cannot be written: {error.strerror}; name a file elsewhere") from error
    finally:
        aside.unlink(missing_ok=True)


def draw_load(plan: OptimizerPlan, *, title: str, flops_per_s: float) -> Figure:
    """Above: FLOP of each rank, experts and dense stacked. Below: bytes that it sends, a panel for each exchange."""
    exchanges = _exchanges(plan)
    height_in = 4.0 + 1.6 * len(exchanges)
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - _TITLE_IN / height_in), hspace=0.05)  # type: ignore[union-attr]
    _title(figure, plan, title, height_in)
    panels = figure.subplots(
        1 + len(exchanges), 1, sharex=True, squeeze=False, height_ratios=(2.2, *([1.0] * len(exchanges)))
    ).flatten()
    # Equal loads by their experts, so that equal bars stand together.
    order = np.lexsort((-plan.ledger.expert_flops.ravel(), -plan.ledger.flops.ravel()))
    _draw_flops(panels[0], plan, order, flops_per_s)
    for axes, (label, (num_bytes, color)) in zip(panels[1:], exchanges.items(), strict=True):
        _draw_bytes(axes, num_bytes.ravel()[order], label, color)
    panels[-1].set_xlabel(f"the {len(order):,} ranks, busiest first")
    return figure


def _title(figure: Figure, plan: OptimizerPlan, title: str, height_in: float) -> None:
    top, grid, layout = 1 - 0.12 / height_in, plan.grid, plan.layout
    ranks = f"{grid.num_ranks:,} GPUs"
    if grid.num_replicas > 1:
        work = "share the work" if plan.owning else "all do this same work"
        ranks = f"{grid.num_replicas} replicas of {ranks}, which {work}"
    subtitle = f"{ranks} · {len(layout.units):,} matrices · busiest rank {layout.imbalance:.3f} × bound"
    figure.text(0.012, top, f"Optimizer step of {title}", fontsize=15, fontweight="bold", color=INK, va="top")
    figure.text(0.012, top - 0.32 / height_in, subtitle, fontsize=10, color=SOFT, va="top")


def _draw_flops(axes: Axes, plan: OptimizerPlan, order: np.ndarray, flops_per_s: float) -> None:
    largest = plan.layout.largest_unit_flops
    scale, prefix = _scale(float(plan.ledger.flops.max(initial=largest)))
    experts, dense = (flops.ravel()[order] / scale for flops in (plan.ledger.expert_flops, plan.ledger.dense_flops))
    parts = {"routed experts": (experts, BLUE), "dense matrices": (dense, ORANGE)}
    _stack(axes, {label: part for label, part in parts.items() if part[0].any()})
    mean, largest = float((experts + dense).mean()), largest / scale
    if largest > mean:
        _level(axes, mean, linestyle=":", label=f"mean {mean:.3g}")
        _level(axes, largest, linestyle="--", label=f"bound: largest matrix {largest:.3g}")
    else:  # one line: two in one place would hide each other
        _level(axes, mean, linestyle="--", label=f"bound: mean {mean:.3g}")
    axes.set_ylim(0, 1.1 * float((experts + dense).max(initial=largest)) or 1)
    axes.set_ylabel(f"Newton-Schulz ({prefix}FLOP)")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.99), ncols=4, borderaxespad=0, fontsize=9)
    per_second, unit = (1e3, "ms") if axes.get_ylim()[1] * scale / flops_per_s > 1e-3 else (1e6, "µs")
    in_time = scale / flops_per_s * per_second
    # Typed loosely, as matplotlib's own are.
    to_time: Callable[[Any], Any] = lambda flops: flops * in_time  # noqa: E731
    to_flops: Callable[[Any], Any] = lambda time: time / in_time  # noqa: E731
    times = axes.secondary_yaxis("right", functions=(to_time, to_flops))
    times.set_ylabel(f"{unit} at {flops_per_s / 1e12:.0f} TFLOP/s", color=INK)
    times.tick_params(colors=SOFT, labelsize=9, length=3)
    times.spines["right"].set_color(PALE)


def _exchanges(plan: OptimizerPlan) -> dict[str, tuple[np.ndarray, str]]:
    """Bytes of each rank [N, K] and a colour, of the exchanges that send anything."""
    sent = plan.bytes_sent
    kinds = {
        "to owners and back": (sent["all_to_all_experts"] + sent["all_to_all_dense"], SKY),
        "between replicas": (sent["replicas_muon"] + sent["replicas_adamw"], SKY),
    }
    return {label: kind for label, kind in kinds.items() if kind[0].any()}


def _draw_bytes(axes: Axes, num_bytes: np.ndarray, label: str, color: str) -> None:
    scale, prefix = _scale(float(num_bytes.max()))
    unit = f"{prefix}B"
    _stack(axes, {label: (num_bytes / scale, color)})
    mean = float(num_bytes.mean() / scale)
    _level(axes, mean, linestyle=":")
    axes.set_ylim(0, 1.15 * float(num_bytes.max()) / scale)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.set_ylabel(f"sent ({unit})")
    words = f"sent {label}: at most {num_bytes.max() / scale:,.3g} {unit}, mean {mean:,.3g}"
    axes.set_title(words, loc="left", fontsize=10, color=SOFT)


def _scale(highest: float) -> tuple[float, str]:
    """The power of a thousand that `highest` is best given in, and its prefix."""
    return next(((scale, prefix) for scale, prefix in _PREFIXES if highest >= scale), _PREFIXES[-1])


def _level(axes: Axes, value: float, *, linestyle: str, label: str | None = None) -> None:
    """A line that stands out from any bar: dark, with a light edge."""
    edge = [Stroke(linewidth=4.0, foreground="white", alpha=0.75), Normal()]
    axes.axhline(value, color=INK, linewidth=1.6, linestyle=linestyle, label=label, path_effects=edge)


def _stack(axes: Axes, parts: dict[str, tuple[np.ndarray, str]]) -> None:
    """Bars without gaps, one for each rank, parts on top of each other."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALE)
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, labelsize=9, length=3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    base: np.ndarray | float = 0.0
    for label, (values, color) in parts.items():
        edges = np.arange(len(values) + 1)
        axes.stairs(base + values, edges, baseline=base, fill=True, color=color, linewidth=0, label=label)
        axes.set_xlim(0, len(values))
        base = base + values
