"""Predictions beside published figures: the reference run before and after, and runs of peers.

The reference run's layout is not published. One layout is stated (`REFERENCE_LAYOUT`) and every figure of it is
predicted; nothing is fitted to a figure. Peers' rows are predicted for *this* code under a stated layout. It is slower
than theirs: its kernels are eager, its dispatch waits, and whole blocks are recomputed. So one number, theirs over
ours, is calibrated on the row that is marked, and the others are judged with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from amalthea.config.overrides import apply_overrides
from amalthea.config.run import RunConfig
from amalthea.core.units import GIB
from amalthea.plan.clusters import get_cluster
from amalthea.plan.optimizer_published import published_estimates
from amalthea.plan.peers import Peer, peers
from amalthea.plan.setting import Code, Setting
from amalthea.plan.sketch import Sketch, sketch
from amalthea.plan.trace import Workload

DOCUMENT_TOKENS = 8192
REFERENCE_GPUS = 1536
REFERENCE_TOKENS = REFERENCE_GPUS * 65_536
REFERENCE_LAYOUT = (
    "parallel.ep=4",
    "parallel.dp_replicate=4",
    "parallel.reduce_dtype=bf16",
    "memory.recompute=block",
    "memory.offload=true",
    "memory.unshard_async_op=true",
)
"""What is stated of the reference run: the experts of a node, gradients reduced in bf16, one sequence per GPU and step."""
BEFORE = (
    *REFERENCE_LAYOUT,
    "memory.unshard_async_op=false",
    "data.seq_len=8192",
    f"train.global_batch_tokens={REFERENCE_GPUS * 8192}",
)
"""One reading of the time before: 8,192 tokens per GPU and step (FACTS §4, inferred)."""
SHARED = (
    "documents of 8,192 tokens; experts perfectly balanced; expandable segments",
    "expert-parallel degree 4, gradients reduced in bf16, one sequence of 65,536 tokens per GPU and step (inferred)",
)


@dataclass(frozen=True)
class Row:
    """One published figure and ours."""

    group: str
    name: str
    unit: str
    published: float
    predicted: float
    use: str
    """`predicted` from the stated layout alone, `calibrated` on this row, or `judged` by a calibration elsewhere."""
    kind: str
    """estimate or simulation"""
    assumptions: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class Check:
    """All rows, and what they say together."""

    rows: tuple[Row, ...]
    calibration: float | None
    """Peers' speed over ours, of the calibrating row."""
    verdict: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        rows = [row.to_json() for row in self.rows]
        return {"rows": rows, "calibration": self.calibration, "verdict": list(self.verdict)}


def check_published(
    reference: RunConfig, code: Code, *, with_peers: bool = True, say: Callable[[str], None] = lambda text: None
) -> Check:
    """Predicts every row. `reference` is the reference model's recipe. Communication: none.

    Time: about a minute of one core, half of it for peers.
    """
    rows = [*_optimizer_rows(reference), *_reference_rows(reference, code, say)]
    calibration = None
    if with_peers:
        found, calibration = _peer_rows(code, say)
        rows += found
    return Check(tuple(rows), calibration, _verdict(rows))


def _optimizer_rows(reference: RunConfig) -> list[Row]:
    return [
        Row("reference", f"optimizer step, {one.name}", "s", one.published_s, one.estimated_s, "predicted", "estimate",
            one.assumptions)
        for one in published_estimates(reference.model)
    ]  # fmt: skip


def _reference_rows(reference: RunConfig, code: Code, say: Callable[[str], None]) -> list[Row]:
    setting = Setting(get_cluster("jupiter"), REFERENCE_GPUS, workload=Workload(document_tokens=DOCUMENT_TOKENS))
    optimizer_s = {one.published_s: one.estimated_s for one in published_estimates(reference.model)}

    def planned(name: str, overrides: tuple[str, ...]) -> Sketch:
        say(f"check {name}")
        return sketch(apply_overrides(reference, overrides), setting, code)

    after = planned("reference, after", REFERENCE_LAYOUT)
    default = planned("reference, FSDP2's streams", (*REFERENCE_LAYOUT, "memory.unshard_async_op=false"))
    before = planned("reference, before", BEFORE)

    def rate(of: Sketch, optimizer: float) -> float:
        """Tokens/s/GPU with the published run's optimizer in place of ours."""
        return of.tokens / (of.step_s - of.optimizer_s + optimizer)

    simulated = [
        ("throughput before", "tokens/s/GPU", 90.0, rate(before, optimizer_s.get(41.7, 41.7)),
         ("8,192 tokens per GPU and step (inferred)", "the optimizer step before, as estimated above")),
        ("throughput after", "tokens/s/GPU", 1300.0, rate(after, optimizer_s.get(2.2, 2.2)),
         ("the optimizer step after, as estimated above",)),
        ("peak reserved, FSDP2's streams", "GiB", 88.1, default.reserved_bytes / GIB, ()),
        ("peak reserved, unshard_async_op", "GiB", 74.6, after.reserved_bytes / GIB, ()),
    ]  # fmt: skip
    return [
        Row("reference", name, unit, published, predicted, "predicted", "simulation", (*SHARED, *more))
        for name, unit, published, predicted, more in simulated
    ]


def _peer_rows(code: Code, say: Callable[[str], None]) -> tuple[list[Row], float | None]:
    found = peers()
    predicted = {peer.name: _predict(peer, code, say) for peer in found}
    factor = next((peer.published / predicted[peer.name] for peer in found if peer.calibrates), None)
    rows = [
        Row("peers", f"{peer.name} ({peer.system})", peer.unit, peer.published, predicted[peer.name], "predicted",
            "simulation", peer.differences)
        for peer in found
    ]  # fmt: skip
    if factor is not None:
        rows += [
            replace(
                row,
                name=f"{row.name}, times {factor:.2f}",
                predicted=row.predicted * factor,
                use="calibrated" if peer.calibrates else "judged",
            )
            for row, peer in zip(rows, found, strict=True)
        ]
    return rows, factor


def _predict(peer: Peer, code: Code, say: Callable[[str], None]) -> float:
    say(f"check {peer.name}")
    cluster = get_cluster(peer.cluster)
    drawn = sketch(peer.config, Setting(cluster, peer.num_gpus), code)
    if peer.unit.startswith("TFLOP"):
        return drawn.mfu * cluster.peak_tflops
    return drawn.tokens_per_s_per_gpu


EXPLAINED = 0.10


def _verdict(rows: list[Row]) -> tuple[str, ...]:
    """In words, from the rows' errors."""
    of_reference = [row for row in rows if row.group == "reference"]
    within = [row for row in of_reference if abs(row.error) <= EXPLAINED]
    beyond = [row for row in of_reference if abs(row.error) > EXPLAINED]
    said = [
        f"one layout, with nothing fitted, explains within {EXPLAINED:.0%}: "
        + ("; ".join(row.name for row in within) or "nothing"),
        "it does not explain: " + ("; ".join(f"{row.name} ({row.error:+.0%})" for row in beyond) or "nothing"),
    ]
    judged = [row for row in rows if row.use == "judged"]
    if judged:
        mean = sum(abs(row.error) for row in judged) / len(judged)
        worst = max(abs(row.error) for row in judged)
        said.append(f"peers: one factor calibrated on one row; judged on {len(judged)} others, mean error {mean:.0%}, "
                    f"worst {worst:.0%}")  # fmt: skip
    return tuple(said)
