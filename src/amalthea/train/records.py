"""What a run writes down about itself: `metrics.jsonl`, `events.jsonl`, TensorBoard and W&B.

One line is one JSON object and one write, so a process killed at any moment tears at most the last line.
Rows are the truth; the console, the trackers and the plots only show them. When a run resumes at step N
its rows after N are removed before new ones come, so each step stands in the file once.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from amalthea.config.run import LoggingConfig
from amalthea.core.errors import TrainingError
from amalthea.core.world import World
from amalthea.train.console import open_display
from amalthea.train.trackers import check_wandb, open_trackers

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished optimizer step, in global figures: sums or maxima over all ranks."""

    step: int
    """Finished optimizer steps; the first is 1."""
    loss: float
    """Mean cross-entropy of the step's tokens, in nats, before the step."""
    grad_norm: float
    """Norm before clipping, every expert included."""
    lr: float
    """AdamW's learning rate."""
    muon_lr: float | None = None
    tokens: int
    """Trained on since step 0."""
    tokens_per_s: float
    step_s: float
    """Wall time from the end of the step before, validation and saving left out."""
    data_s: float = 0.0
    """Part of `step_s` spent waiting for the batch."""
    aux_loss: float = 0.0
    z_loss: float = 0.0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    stranded_bytes: int = 0
    """Free, and of no use to whoever asks for more: see `memory/monitor.py`."""
    num_alloc_retries: int = 0
    expert_imbalance: float | None = None
    """Largest over layers of greatest / mean expert load: 1 is even; none without MoE layers."""
    expert_imbalance_by_layer: tuple[float, ...] = ()
    expert_load: tuple[tuple[float, ...], ...] | None = None
    """Share of its layer's routed tokens, [MoE layers][experts]; kept only at some steps."""
    max_attention_logit: float | None = None
    """Largest over layers and heads, before the step; only with QK-clip."""
    clipped_heads: int | None = None
    """Heads that QK-clip scaled down in this step."""
    tokens_dropped: int = 0
    tokens_by_language: Mapping[str, int] | None = None
    """Tokens of this step."""


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """One pass over the held-out text, after `step` optimizer steps; 0 is before training."""

    step: int
    loss: float
    bits_per_byte: Mapping[str, float]
    """By language code."""
    mean_bits_per_byte: float
    """Mean over languages, each counting the same."""
    seconds: float = 0.0
    tokens: int = 0


class Recorder:
    """Writes a run's records; only rank 0 writes, on other ranks every method does nothing.

    `resumed_step` is the step of the checkpoint that was loaded, 0 for a fresh start. Rows after it are from
    a life that was lost: they are dropped (with the torn last line), and a `rows_dropped` event says how
    many. A fresh start drops all of them. `console` defaults to standard output.

    Raises MissingDependencyError, on every rank alike, if W&B is asked for and not installed; TrainingError
    if the folder cannot be written. Communication: none.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        world: World,
        logging: LoggingConfig,
        total_steps: int,
        resumed_step: int = 0,
        console: Console | None = None,
    ) -> None:
        if logging.wandb:
            check_wandb()
        self.run_dir = Path(run_dir)
        self._active = world.is_main
        self._closed = not world.is_main
        self._load_every_steps = logging.every_steps
        self._total_steps = total_steps
        self._validated: set[int] = set()
        self._last_validation: ValidationRecord | None = None
        if not self._active:
            return

        kept = self._open_files(resumed_step)
        self._trackers = open_trackers(self.run_dir, logging=logging, resumed_step=resumed_step)
        self._display = open_display(console or Console(), total_steps=total_steps, every_steps=logging.every_steps)
        self.event("opened", resumed_step=resumed_step, total_steps=total_steps, num_ranks=world.size)
        if kept.num_dropped:
            self.event(
                "rows_dropped",
                resumed_step=resumed_step,
                train_rows=kept.train_dropped,
                validation_rows=kept.validation_dropped,
                torn_lines=kept.torn_dropped,
            )

    def step(self, record: StepRecord) -> None:
        """Writes a training row; `expert_load` is kept every `logging.every_steps` steps, first and last."""
        if not self._active:
            return
        written = record if self.keeps_expert_load(record.step) else replace(record, expert_load=None)
        self._metrics.append(_row("train", written))
        self._track(record.step, _step_scalars(record))
        self._display.step(record)

    def validation(self, record: ValidationRecord) -> None:
        """Writes a validation row, at most one a step."""
        if not self._active or self.has_validation(record.step):
            return
        self._metrics.append(_row("validation", record))
        self._track(record.step, _validation_scalars(record))
        self._display.validation(record, previous=self._last_validation)
        self._validated.add(record.step)
        self._last_validation = record

    def has_validation(self, step: int) -> bool:
        """Whether the validation after `step` is written down already.

        Known on rank 0 only, False elsewhere: ranks must agree (a maximum over them) before they act on it.
        """
        return step in self._validated

    def keeps_expert_load(self, step: int) -> bool:
        """Whether the row of `step` will hold `expert_load`; elsewhere it need not be fetched from the device."""
        return step % self._load_every_steps == 0 or step in (1, self._total_steps)

    def event(self, kind: str, **fields: Any) -> None:
        """Appends what happened, with the time (UTC, ISO 8601)."""
        if self._active:
            self._events.append({"time": _now(), "kind": kind} | _finite(fields))

    def progress(self, text: str) -> None:
        """Shows what the run does between steps, such as `saving checkpoint …`; the next step clears it."""
        if self._active:
            self._display.progress(text)

    def note(self, text: str) -> None:
        """Shows a line that stays, such as `resumed after step 200`."""
        if self._active:
            self._display.note(text)

    def close(self) -> None:
        """Ends the display and the trackers; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._display.close()
            self.event("closed")
        finally:
            for tracker in self._trackers:
                tracker.close()
            self._metrics.close()
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An error is told as it is: on a full disk, closing would raise another one in its place.
        with suppress(TrainingError) if error else nullcontext():
            self.close()

    def _open_files(self, resumed_step: int) -> Kept:
        metrics, events = self.run_dir / METRICS_FILE, self.run_dir / EVENTS_FILE
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            kept = keep_rows_until(metrics, step=resumed_step)
            _cut_torn_line(events)
            self._metrics, self._events = JsonLines(metrics), JsonLines(events)
        except OSError as error:
            raise _unwritable(self.run_dir, error) from error
        self._validated = {record.step for record in kept.validations}
        self._last_validation = kept.validations[-1] if kept.validations else None
        return kept

    def _track(self, step: int, scalars: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.scalars(step, scalars)


class JsonLines:
    """An append-only file of JSON objects, one unbuffered write each; one that does not fit is undone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run

    def append(self, row: Mapping[str, Any]) -> None:
        """Raises TrainingError if the line cannot be written; the file then ends with the line before."""
        line = _dump(row)
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)
            raise _unwritable(self._path, error) from error

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Kept:
    """What `keep_rows_until` left in the file, and what it took out."""

    validations: tuple[ValidationRecord, ...] = ()
    train_dropped: int = 0
    validation_dropped: int = 0
    torn_dropped: int = 0

    @property
    def num_dropped(self) -> int:
        return self.train_dropped + self.validation_dropped + self.torn_dropped


def keep_rows_until(path: Path, *, step: int) -> Kept:
    """Removes from a metrics file the rows after `step`, and all rows if `step` is 0.

    Lines that are no JSON object go too. The file is written aside and renamed; where nothing has to go it
    stays untouched. Raises OSError.
    """
    if not path.exists():
        return Kept()
    aside = path.with_name(path.name + ".tmp")
    validations: list[ValidationRecord] = []
    dropped = {"train": 0, "validation": 0, "torn": 0}
    try:
        with open(path, "rb") as source, open(aside, "wb") as target:
            for line in source:
                row = _parse(line)
                kind = row["kind"] if row else "torn"
                if row is None or step == 0 or row["step"] > step:
                    dropped[kind] = dropped.get(kind, 0) + 1
                    continue
                if kind == "validation":
                    validations.append(_validation_of(row))
                target.write(line if line.endswith(b"\n") else line + b"\n")
            target.flush()
            os.fsync(target.fileno())
        if sum(dropped.values()):
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return Kept(tuple(validations), dropped["train"], dropped["validation"], dropped["torn"])


def _step_scalars(record: StepRecord) -> dict[str, float]:
    names = {
        "train/loss": record.loss,
        "train/aux_loss": record.aux_loss,
        "train/z_loss": record.z_loss,
        "train/grad_norm": record.grad_norm,
        "train/lr": record.lr,
        "train/muon_lr": record.muon_lr,
        "train/tokens": record.tokens,
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/step_s": record.step_s,
        "speed/data_s": record.data_s,
        "memory/peak_allocated_bytes": record.peak_allocated_bytes,
        "memory/peak_reserved_bytes": record.peak_reserved_bytes,
        "memory/stranded_bytes": record.stranded_bytes,
        "memory/num_alloc_retries": record.num_alloc_retries,
        "experts/imbalance": record.expert_imbalance,
        "experts/tokens_dropped": record.tokens_dropped,
    }
    return {name: value for name, value in names.items() if value is not None}


def _validation_scalars(record: ValidationRecord) -> dict[str, float]:
    by_language = {f"bits_per_byte/{code}": value for code, value in record.bits_per_byte.items()}
    return {
        "validation/loss": record.loss,
        "validation/mean_bits_per_byte": record.mean_bits_per_byte,
    } | by_language


def _row(kind: str, record: StepRecord | ValidationRecord) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    values = {name: value for name, value in values.items() if value is not None}
    if "expert_load" in values:
        # Shares of up to hundreds of experts in every layer; six decimals keep the file small.
        values["expert_load"] = [[round(share, 6) for share in layer] for layer in values["expert_load"]]
    return {"kind": kind, "time": _now()} | _finite(values)


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: such numbers become null, and `nonfinite` lists their names."""
    names: list[str] = []

    def clean(value: Any, *path: str | int) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            names.append(".".join(map(str, path)))
            return None
        if isinstance(value, Mapping):
            return {key: clean(item, *path, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item, *path, index) for index, item in enumerate(value)]
        return value

    cleaned = clean(row)
    return cleaned | ({"nonfinite": names} if names else {})


def _dump(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n").encode()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("kind"), str) and isinstance(row.get("step"), int)
    return row if whole else None


def _validation_of(row: Mapping[str, Any]) -> ValidationRecord:
    def number(value: float | None) -> float:
        return math.nan if value is None else value

    return ValidationRecord(
        step=row["step"],
        loss=number(row.get("loss")),
        bits_per_byte={code: number(value) for code, value in row.get("bits_per_byte", {}).items()},
        mean_bits_per_byte=number(row.get("mean_bits_per_byte")),
        seconds=number(row.get("seconds")),
        tokens=row.get("tokens", 0),
    )


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(path, whole)


def _unwritable(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"cannot write {path}: {error.strerror or error}; make room or give write access, "
        "then start the same run folder again: it goes on from its newest checkpoint"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
