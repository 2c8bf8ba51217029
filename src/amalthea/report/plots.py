"""Pictures of a run: loss, bits per byte by language, throughput, experts.

Drawn with matplotlib's objects, never its global state, so that they can be drawn beside anything else.
Colours are Okabe and Ito's, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from amalthea.core.units import format_count
from amalthea.report.records import RunRecords, read_run

BLUE, SKY, ORANGE, GREEN = "#0072B2", "#56B4E9", "#D55E00", "#009E73"
INK, SOFT, GRID, PALE = "#222222", "#6b6b6b", "#e4e4e4", "#bdbdbd"
DPI = 150
WIDTH_IN = 8.0
TITLE_IN = 0.72
MAX_POINTS = 1000


def write_plots(run_dir: Path | str) -> list[Path]:
    """Draws what the run's records allow into `run_dir/plots` and returns the files, each 1200 pixels wide.

    `loss.png` and `throughput.png` need a training step, `bits_per_byte.png` a validation, `experts.png`
    a MoE layer; what there is nothing to draw for is left out. Each file is written aside and renamed.
    Raises DataError if `run_dir` is no run folder.
    """
    run = read_run(run_dir)
    drawings: tuple[tuple[str, Callable[[RunRecords], Figure], bool], ...] = (
        ("loss.png", draw_loss, bool(run.train)),
        ("bits_per_byte.png", draw_bits_per_byte, bool(run.languages)),
        ("throughput.png", draw_throughput, bool(run.train)),
        ("experts.png", draw_experts, any(row.get("expert_imbalance") is not None for row in run.train)),
    )
    folder = run.run_dir / "plots"
    folder.mkdir(exist_ok=True)
    return [_save(draw(run), folder / name) for name, draw, possible in drawings if possible]


def draw_loss(run: RunRecords) -> Figure:
    """Loss over steps with the validations; under it the learning rate and the gradient norm."""
    figure, (top, middle, bottom) = _figure("Training loss", run, heights=(3.4, 1.0, 1.0), height_in=7.0)
    steps = run.column("step")
    _curve(top, steps, run.column("loss"), color=BLUE, label="training")
    if run.validation:
        at, loss = run.column("step", rows=run.validation), run.column("loss", rows=run.validation)
        top.plot(at, loss, "o", color=ORANGE, markeredgecolor="white", markersize=7, label="validation")
    top.set_ylabel("loss (nats per token)")
    top.legend(frameon=False, loc="upper right")

    middle.plot(steps, run.column("lr"), color=GREEN, linewidth=1.6, marker=_marker(steps), label="AdamW")
    muon = run.column("muon_lr")
    if np.isfinite(muon).any() and not np.array_equal(muon, run.column("lr")):
        middle.plot(steps, muon, "--", color=ORANGE, linewidth=1.6, label="Muon")
        middle.legend(frameon=False, loc="lower left", ncols=2)
    middle.set_ylim(bottom=0)
    middle.set_ylabel("learning rate")
    middle.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)

    norm = run.column("grad_norm")
    _curve(bottom, steps, norm, color=BLUE)
    bottom.set_ylabel("gradient norm")
    if _spread(norm) > 10:
        bottom.set_yscale("log")
        bottom.yaxis.set_major_locator(LogLocator(subs=(1.0,), numticks=5))
        bottom.yaxis.set_minor_formatter(NullFormatter())
        bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        bottom.set_ylim(bottom=0)
    _steps_axis(bottom, steps, above=(top, middle))
    return figure


def draw_bits_per_byte(run: RunRecords) -> Figure:
    """Each language from its first validation to its last, best on top; beside it all of them over steps."""
    height_in = max(4.0, 1.6 + 0.25 * len(run.languages))
    figure, (left, right) = _figure(
        "Validation bits per byte", run, widths=(1.15, 1.0), height_in=height_in, note="lower is better"
    )
    steps = run.column("step", rows=run.validation)
    series = {code: run.bits_per_byte(code) for code in run.languages}
    series = {code: values for code, values in series.items() if np.isfinite(values).any()}
    ranked = sorted(series, key=lambda code: _finite(series[code])[-1], reverse=True)
    _dumbbells(left, {code: _finite(series[code]) for code in ranked}, steps)

    for code in ranked:
        label = "each language" if code == ranked[0] else None
        right.plot(steps, series[code], color=PALE, linewidth=0.9, marker=_marker(steps), markersize=3, label=label)
    mean = run.column("mean_bits_per_byte", rows=run.validation)
    label = f"mean, last {_finite(mean)[-1]:.3f}" if len(_finite(mean)) else "mean"
    right.plot(steps, mean, "o-", color=BLUE, linewidth=2.4, markersize=5, label=label)
    right.legend(frameon=False, loc="upper right")
    right.margins(x=0.03)
    right.set_ylabel("bits per byte")
    _steps_axis(right, steps)
    return figure


def draw_throughput(run: RunRecords) -> Figure:
    """Tokens per second, time of a step with its wait for data, and memory."""
    figure, (top, middle, bottom) = _figure("Throughput", run, heights=(1.5, 1.5, 1.0), height_in=6.6)
    steps, speed = run.column("step"), run.column("tokens_per_s")
    _curve(top, steps, speed, color=BLUE)
    top.set_ylabel("tokens per second")
    top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    top.set_ylim(0, _ceiling(top, speed))
    if np.isfinite(speed).any():
        median = float(np.nanmedian(speed))
        top.axhline(median, color=SOFT, linewidth=0.9, linestyle=":", zorder=1)
        top.set_title(f"median {format_count(median)} tokens/s", loc="right", fontsize=9, color=SOFT)

    step_s = run.column("step_s")
    _curve(middle, steps, step_s, color=BLUE, label="whole step")
    middle.fill_between(steps, run.column("data_s"), color=ORANGE, linewidth=0, alpha=0.8, label="data wait")
    middle.set_ylim(0, _ceiling(middle, step_s))
    middle.set_ylabel("seconds per step")
    _legend_above(middle)

    for name, color, label in (("reserved", SKY, "peak reserved"), ("allocated", BLUE, "peak allocated")):
        gib = run.column(f"peak_{name}_bytes") / 1024**3
        bottom.plot(steps, gib, color=color, linewidth=1.6, marker=_marker(steps), label=label)
    bottom.set_ylim(0, 1.15 * bottom.get_ylim()[1])
    bottom.set_ylabel("memory (GiB)")
    _legend_above(bottom)
    _steps_axis(bottom, steps, above=(top, middle))
    return figure


def draw_experts(run: RunRecords) -> Figure:
    """Imbalance of the expert load over steps; under it the newest load of every expert in every layer."""
    load = run.expert_load
    heights = (1.0,) if load is None else (1.0, 1.25)
    figure, axes = _figure("Expert load", run, heights=heights, height_in=3.6 if load is None else 7.0)
    top, steps = axes[0], run.column("step")
    worst = run.column("expert_imbalance")
    _curve(top, steps, worst, color=BLUE, label="worst layer")
    layers = _layers(run)
    if len(layers) > 1:
        _curve(top, steps, np.median(layers, axis=0), color=SKY, label="median layer", raw=False)
    top.axhline(1.0, color=GREEN, linewidth=1.2, linestyle="--", label="even")
    highest = float(_finite(worst).max(initial=1.0))
    top.set_ylim(0.95, max(1.5, 1.05 * highest))
    if highest > 4:
        top.set_yscale("log")
        top.yaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 5, 7, 10, 20, 50, 100, 200]))
        top.yaxis.set_minor_locator(NullLocator())
        top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    top.set_ylabel("greatest / mean load")
    _legend_above(top)
    _steps_axis(top, steps)
    if load is not None:
        _heat_map(figure, axes[1], run, step=load[0], relative=load[1] * load[1].shape[1])
    return figure


def _heat_map(figure: Figure, axes: Axes, run: RunRecords, *, step: int, relative: np.ndarray) -> None:
    first_layer = run.config.get("model", {}).get("num_dense_layers", 0)
    layers, experts = relative.shape
    image = axes.imshow(
        relative,
        aspect="auto",
        interpolation="nearest",
        cmap="PuOr_r",
        norm=TwoSlopeNorm(1.0, vmin=0.0, vmax=max(2.0, float(relative.max()))),
        extent=(-0.5, experts - 0.5, first_layer + layers - 0.5, first_layer - 0.5),
    )
    axes.grid(False)
    axes.set_title(f"load at step {step}, as a multiple of the even share", loc="left", fontsize=10, color=SOFT)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=18)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue] - its stub lacks the artist
    bar.ax.tick_params(labelsize=9, length=0, colors=SOFT)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))


def _dumbbells(axes: Axes, values: dict[str, np.ndarray], steps: np.ndarray) -> None:
    rows = np.arange(len(values))
    first = np.array([series[0] for series in values.values()])
    last = np.array([series[-1] for series in values.values()])
    moved = len(steps) > 1
    if moved:
        axes.hlines(rows, last, first, color=PALE, linewidth=2, zorder=1)
        axes.plot(first, rows, "o", color="white", markeredgecolor=SOFT, markersize=6, label="first")
    axes.plot(last, rows, "o", color=BLUE, markersize=7, label="last")
    for row, (before, value) in enumerate(zip(first, last, strict=True)):
        outwards = -1 if value <= before else 1
        axes.annotate(
            f"{value:.2f}",
            (float(value), float(row)),
            xytext=(8 * outwards, 0),
            textcoords="offset points",
            ha="right" if outwards < 0 else "left",
            va="center",
            fontsize=9,
            color=INK,
        )
    title = f"step {steps[0]:.0f} (open) to {steps[-1]:.0f} (filled)" if moved else f"step {steps[0]:.0f}"
    axes.set_title(title, loc="left", fontsize=10, color=SOFT)
    axes.set_yticks(rows, list(values))
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(-0.7, len(values) - 0.3)
    axes.grid(False, axis="y")
    axes.margins(x=0.16)
    axes.set_xlabel("bits per byte")


def _figure(
    title: str,
    run: RunRecords,
    *,
    height_in: float,
    heights: tuple[float, ...] = (1.0,),
    widths: tuple[float, ...] = (1.0,),
    note: str = "",
) -> tuple[Figure, list[Axes]]:
    """A figure with a title line over a grid of axes; panels under each other share their steps."""
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - TITLE_IN / height_in), hspace=0.04, wspace=0.05)  # type: ignore[union-attr]
    top = 1 - 0.12 / height_in
    figure.text(0.012, top, title, fontsize=15, fontweight="bold", color=INK, va="top")
    subtitle = " · ".join(part for part in (run.run_dir.resolve().name, _progress(run), note) if part)
    figure.text(0.012, top - 0.32 / height_in, subtitle, fontsize=10, color=SOFT, va="top")
    axes = figure.subplots(
        len(heights), len(widths), squeeze=False, height_ratios=heights, width_ratios=widths
    ).flatten()
    for panel in axes:
        _plain(panel)
    return figure, list(axes)


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALE)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.tick_params(colors=SOFT, labelsize=9, length=3)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def _progress(run: RunRecords) -> str:
    if not run.train:
        return ""
    last = run.train[-1]
    return f"step {last['step']:,} · {format_count(last.get('tokens') or 0)} tokens"


def _curve(
    axes: Axes, steps: np.ndarray, values: np.ndarray, *, color: str, label: str | None = None, raw: bool = True
) -> None:
    """Raw values thin, their running median on top."""
    if raw:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.45, marker=_marker(steps), markersize=4)
    at = np.unique(np.linspace(0, len(steps) - 1, MAX_POINTS).astype(int))
    smoothed = running_median(values, at=at)
    axes.plot(steps[at], smoothed, color=color, linewidth=1.9, label=label, marker=_marker(steps))


def running_median(values: np.ndarray, *, at: np.ndarray) -> np.ndarray:
    """Median of the finite values around each index of `at`, over about a thirtieth of all; NaN where none is.

    The window narrows towards the start, so that a steep one is not flattened.
    """
    half = max(1, len(values) // 60)
    medians = np.full(len(at), np.nan)
    for position, index in enumerate(at):
        reach = min(half, index)
        near = _finite(values[index - reach : index + reach + 1])
        if len(near):
            medians[position] = np.median(near)
    return medians


def _ceiling(axes: Axes, values: np.ndarray) -> float:
    """Upper end of an axis that leaves out rare spikes, such as a first step that compiles, and says so."""
    finite = _finite(values)
    if not len(finite):
        return 1.0
    top = 1.12 * float(finite.max())
    usual = 1.6 * float(np.percentile(finite, 97))
    if top <= 2 * usual or len(finite) < 20:
        return top or 1.0
    above = int((finite > usual).sum())
    axes.set_title(f"{above} above the frame, up to {finite.max():.3g}", loc="right", fontsize=9, color=SOFT)
    return usual


def _layers(run: RunRecords) -> np.ndarray:
    """Imbalance of each MoE layer over steps, [layers, steps]; no layers where steps disagree on them."""
    rows = [row.get("expert_imbalance_by_layer") or [] for row in run.train]
    if len({len(row) for row in rows}) != 1:
        return np.empty((0, len(rows)))
    return np.array(rows, dtype=np.float64).T


def _steps_axis(axes: Axes, steps: np.ndarray, *, above: Sequence[Axes] = ()) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    if max(panel.dataLim.width for panel in (axes, *above)) == 0:
        axes.set_xlim(steps[0] - 0.5, steps[0] + 0.5)
    for panel in above:
        panel.sharex(axes)
        panel.tick_params(labelbottom=False)


def _legend_above(axes: Axes) -> None:
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=3, borderaxespad=0)


def _marker(steps: np.ndarray) -> str:
    """A single step draws no line, so it gets a dot."""
    return "o" if len(steps) == 1 else ""


def _spread(values: np.ndarray) -> float:
    finite = _finite(values)
    low = float(finite.min()) if len(finite) else 0.0
    return float(finite.max()) / low if low > 0 else 1.0


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def _save(figure: Figure, path: Path) -> Path:
    aside = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(aside, format="png")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path
