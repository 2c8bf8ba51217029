"""A quick plan: a few layers traced at two depths, and a straight line through them to the whole model.

Blocks are alike, so seconds and bytes of a step grow by the same for each further group of blocks. The line is exact
for what each layer adds; it errs where the peak's moment moves with depth, and in what the allocator strands, for which
the deeper trace stands. Optimizer state is balanced over ranks only where there is much of it, so its bytes are
counted instead. `tests/plan/test_sketch.py` holds the line against a deeper trace. A *simulation*, extrapolated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from amalthea.config.check import resolve
from amalthea.config.run import RunConfig
from amalthea.core.units import GIB
from amalthea.plan.allocator import replay
from amalthea.plan.devices import device_cap_gib, host_cap_bytes
from amalthea.plan.fits import memory_floor
from amalthea.plan.setting import Code, Setting
from amalthea.plan.timeline import Timeline, Use

GROUPS = (4, 6)
"""Groups of blocks that are traced, after the dense layers."""


@dataclass(frozen=True)
class Sketch:
    """Figures of one rank's step, as a whole plan would have them."""

    tokens: int
    step_s: float
    optimizer_s: float
    compute_s: float
    busy_s: dict[str, float]
    """By kind of kernel, collective or copy."""
    exposed_s: dict[str, float]
    """By kind of collective or copy; kinds may be exposed at once."""
    mfu: float
    hfu: float
    by_class: dict[str, int]
    """Bytes at the peak."""
    reserved_bytes: int
    """Demand, without a cap."""
    reserved_otherwise_bytes: int
    """The same without expandable segments, or with, where the setting is without."""
    host_bytes: int
    device_cap_gib: float
    host_cap_bytes: int

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step_s

    def step_s_with(self, optimizer_s: float) -> float:
        """The step with another optimizer's seconds in place of ours."""
        return self.step_s - self.optimizer_s + optimizer_s

    @property
    def allocated_bytes(self) -> int:
        return sum(self.by_class.values())

    @property
    def problem(self) -> str | None:
        """Why it does not fit; none where it does."""
        reserved, allocated = self.reserved_bytes / GIB, self.allocated_bytes / GIB
        if self.host_bytes > self.host_cap_bytes:
            return f"host memory: {self.host_bytes / GIB:.1f} of {self.host_cap_bytes / GIB:.1f} GiB"
        if reserved > self.device_cap_gib:
            kind = "allocates" if allocated > self.device_cap_gib else "reserves"
            needs = max(allocated, reserved) if kind == "reserves" else allocated
            largest = max(self.by_class, key=lambda name: self.by_class[name])
            return (
                f"{kind} {needs:.1f} of {self.device_cap_gib:.1f} GiB; "
                f"most is {largest}, {self.by_class[largest] / GIB:.1f}"
            )
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "figures_are": "simulation",
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "step_s": self.step_s,
            "optimizer_s": self.optimizer_s,
            "compute_s": self.compute_s,
            "busy_s": self.busy_s,
            "exposed_s": self.exposed_s,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "allocated_gib": self.allocated_bytes / GIB,
            "reserved_gib": self.reserved_bytes / GIB,
            "reserved_gib_other_allocator": self.reserved_otherwise_bytes / GIB,
            "host_gib": self.host_bytes / GIB,
            "by_class_gib": {name: value / GIB for name, value in self.by_class.items()},
            "fits": self.problem is None,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class _Shallow:
    """One traced depth."""

    layers: int
    tokens: int
    timeline: Timeline
    by_class: dict[str, int]
    reserved: int
    reserved_otherwise: int
    allocated: int
    host: int
    peak: str
    """The part of the step in which most is allocated."""


def sketch(config: RunConfig, setting: Setting, code: Code) -> Sketch:
    """Plans `config` from two shallow traces; models that are no deeper than those are traced whole.

    Raises ConfigError as `plan_run` does. Communication: none. Time: about 6 s of one core for any depth and ranks.
    """
    setting.cluster.check_holds(setting.num_gpus)
    dense, per_group = config.model.num_dense_layers, config.memory.blocks_per_group
    depths = [dense + groups * per_group for groups in GROUPS]
    if config.model.num_layers <= depths[-1]:
        depths = [config.model.num_layers] * 2
    low = _shallow(config, setting, code, depths[0])
    high = low if depths[0] == depths[1] else _shallow(config, setting, code, depths[1])
    if low.peak != high.peak and config.model.num_layers > (deeper := depths[1] + 2 * per_group):
        # The peak has moved: from here on it stays.
        low, high = high, _shallow(config, setting, code, deeper)
    return _line(config, setting, low, high)


def _shallow(config: RunConfig, setting: Setting, code: Code, layers: int) -> _Shallow:
    model = config.model.model_copy(update={"num_layers": layers})
    changed = config.model_copy(update={"model": model})
    trace = setting.trace(changed, code)
    memory = replay(trace, settings=setting.allocator)
    switched = replace(setting.other_allocator, cap_gib=None)
    peak = memory.demand.peak_allocated
    timeline = setting.simulator(trace).timeline(setting.assumptions_of(config))
    return _Shallow(
        layers=layers,
        tokens=trace.tokens,
        timeline=timeline,
        by_class=peak.by_class,
        reserved=memory.demand.peak_reserved.reserved_bytes,
        reserved_otherwise=replay(trace, settings=switched).demand.peak_reserved.reserved_bytes,
        allocated=peak.allocated_bytes,
        host=memory.host_peak_bytes,
        peak=peak.phase.name,
    )


def _line(config: RunConfig, setting: Setting, low: _Shallow, high: _Shallow) -> Sketch:
    further = config.model.num_layers - high.layers
    step = (high.layers - low.layers) or 1

    def at(before: float, after: float) -> float:
        return max(0.0, after + (after - before) / step * further)

    first, last = low.timeline, high.timeline
    step_s = at(first.step_s, last.step_s)
    peak = setting.cluster.peak_flops_per_s
    done = at(first.hfu * first.step_s, last.hfu * last.step_s) * peak
    by_class = _classes(config, setting, low, high, further / step)
    host = round(at(low.host, high.host))
    stays = _over_budget(config, setting, host)
    by_class["boundaries"] = by_class.get("boundaries", 0) + stays
    allocated = sum(by_class.values())
    return Sketch(
        tokens=high.tokens,
        step_s=step_s,
        optimizer_s=at(first.optimizer_s, last.optimizer_s),
        compute_s=at(first.compute_s, last.compute_s),
        busy_s={name: at(before.busy_s, use.busy_s) for name, before, use in _pairs(first.kinds, last.kinds)},
        exposed_s={
            name: at(before.exposed_s, use.exposed_s) for name, before, use in _pairs(first.kinds, last.transfers)
        },
        mfu=setting.model_flops_per_token(config) * high.tokens / (step_s * peak),
        hfu=done / (step_s * peak),
        by_class=by_class,
        reserved_bytes=allocated + high.reserved - high.allocated,
        reserved_otherwise_bytes=allocated + high.reserved_otherwise - high.allocated,
        host_bytes=host - stays,
        device_cap_gib=device_cap_gib(setting.cluster, setting.reserves),
        host_cap_bytes=host_cap_bytes(setting.cluster, setting.reserves),
    )


def _classes(config: RunConfig, setting: Setting, low: _Shallow, high: _Shallow, times: float) -> dict[str, int]:
    growing = {"parameters", "gradients", "activations", "boundaries"}
    if not config.parallel.reshard_after_forward:
        growing.add("gathered")
    found = {}
    for name, value in high.by_class.items():
        before = low.by_class.get(name, 0)
        # What lives for a block only is as large at any depth; between depths it differs where the peak has moved.
        found[name] = round(value + max(0, value - before) * times) if name in growing else max(value, before)
    if times:
        floor = memory_floor(config, resolve(config, world_size=setting.num_gpus))
        found["optimizer"] = max(floor.optimizer, high.by_class.get("optimizer", 0))
    return found


def _over_budget(config: RunConfig, setting: Setting, host: int) -> int:
    """Boundaries' bytes on the host that its budget has no room for; shallow traces stay below it, and do not show."""
    budget_gib = config.memory.offload_budget_gib
    if budget_gib is None:
        return 0
    kept = config.memory.model_copy(update={"offload": False})
    without = config.model_copy(update={"memory": kept})
    others = memory_floor(without, resolve(without, world_size=setting.num_gpus)).host
    return max(0, host - others - int(budget_gib * GIB))


def _pairs(first: dict[str, Use], last: dict[str, Use]) -> Iterator[tuple[str, Use, Use]]:
    """Kinds of the deeper trace, with what they took in the shallower one, or take now where it had none."""
    return ((name, first.get(name, use), use) for name, use in last.items())
