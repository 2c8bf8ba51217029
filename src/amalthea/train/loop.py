"""The story of a run: build, resume, step, validate, save, leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from amalthea.checkpoint import store
from amalthea.config.check import ResolvedRun
from amalthea.config.run import RunConfig
from amalthea.core.errors import CheckpointError
from amalthea.core.world import World
from amalthea.data.batch import Batch
from amalthea.data.dataset import PreparedData, TrainData, ValidationData
from amalthea.memory.offload import host_bytes_of_rank
from amalthea.memory.watch import MemoryWatch
from amalthea.optim.assign import describe
from amalthea.optim.schedule import lr_factor
from amalthea.train.build import Run, build
from amalthea.train.records import Recorder, StepRecord
from amalthea.train.step import StepResult, train_step
from amalthea.train.validate import validate

StopReason = Literal["interrupt", "requeue"]
"""Why a run leaves early: Ctrl-C, or a scheduler's signal."""

_STOP_REASONS: tuple[StopReason, ...] = ("interrupt", "requeue")


@dataclass(frozen=True)
class TrainResult:
    """How the run ended: `stopped` is none when all steps are done."""

    step: int
    tokens: int
    stopped: StopReason | None
    checkpoint: Path | None


def train(
    config: RunConfig,
    resolved: ResolvedRun,
    world: World,
    prepared: PreparedData,
    *,
    run_dir: Path,
    stop_requested: Callable[[], StopReason | None] = lambda: None,
) -> TrainResult:
    """Trains from the newest whole checkpoint of `run_dir`, or from the start, to the last step.

    Every rank calls it, with a default process group. `stop_requested` is asked once a step; if it answers on any
    rank, all ranks save after that step and return. Raises TrainingError, CheckpointError.
    """
    with MemoryWatch(config.memory, run_dir=run_dir, rank=world.rank, device=torch.device(world.torch_device)) as watch:
        run = build(config, resolved, world)
        watch.follow(run.model, run.optimizers.named_state)
        data = TrainData(
            prepared, config.data, seed=config.seed, global_batch_sequences=resolved.global_batch_sequences
        )
        held_out = ValidationData(prepared, config.data)
        start = _resume(run, run_dir)
        store.check_staging(run.named_tensors(), host_bytes=host_bytes_of_rank(world))
        with Recorder(
            run_dir,
            world=world,
            logging=config.logging,
            total_steps=config.train.steps,
            resumed_step=start.step,
        ) as recorder:
            for line in [*describe(run.optimizers.assignments), *([run.offload.describe()] if run.offload else [])]:
                recorder.note(line)
                recorder.event("layout", text=line)
            for path, reason in start.skipped:
                recorder.event("checkpoint_skipped", path=str(path), reason=reason)
                recorder.note(f"skipped {path.name}: {reason}")
            if start.checkpoint is not None:
                recorder.event("resumed", step=start.step, path=str(start.checkpoint))
                recorder.note(_resumed(start.step, of=config.train.steps))
            story = _Story(run, data, held_out, recorder, run_dir, prepared, watch)
            return story.tell(start, stop_requested)


@dataclass(frozen=True)
class _Start:
    step: int
    checkpoint: Path | None
    skipped: tuple[tuple[Path, str], ...]


def _resume(run: Run, run_dir: Path) -> _Start:
    """Loads the newest whole checkpoint in place, if there is one and the configuration allows it.

    Raises CheckpointError where none of several is whole: to start over would throw the work away in silence.
    """
    found = store.find_newest(run_dir)
    skipped = tuple((s.path, s.reason) for s in found.skipped)
    if found.path is None:
        if damaged := [f"{path.name} ({reason})" for path, reason in skipped if path.suffix != ".tmp"]:
            raise CheckpointError(
                f"{run_dir / 'checkpoints'} has no whole checkpoint to go on from: {', '.join(damaged)}; bring one "
                "back, or delete them to train from the beginning, or name another --run-dir"
            )
        return _Start(0, None, skipped)
    if run.config.checkpoint.resume == "never":
        raise CheckpointError(
            f"{run_dir} already holds the checkpoint {found.path.name}, and checkpoint.resume is never; "
            "name another --run-dir or set checkpoint.resume=auto"
        )
    progress = store.load(found.path, run.named_tensors())
    return _Start(int(progress["step"]), found.path, skipped)


def _resumed(step: int, *, of: int) -> str:
    if step < of:
        return f"resumed after step {step}"
    return f"nothing to do: {step} steps are done; set train.steps higher than {step} to go on"


class _Story:
    """The loop itself, with what it needs at hand."""

    def __init__(
        self,
        run: Run,
        data: TrainData,
        held_out: ValidationData,
        recorder: Recorder,
        run_dir: Path,
        prepared: PreparedData,
        watch: MemoryWatch,
    ) -> None:
        self.watch = watch
        self.run, self.data, self.held_out, self.recorder, self.run_dir = run, data, held_out, recorder, run_dir
        self.token_bytes = torch.as_tensor(prepared.token_bytes)
        self.languages = prepared.languages
        self.checkpoint: Path | None = None

    def tell(self, start: _Start, stop_requested: Callable[[], StopReason | None]) -> TrainResult:
        config = self.run.config
        stopped: StopReason | None = None
        self.checkpoint = start.checkpoint
        step = start.step
        if step == 0:
            self._validate(0)
        while step < config.train.steps and stopped is None:
            stopped = self._step(step, stop_requested)
            step += 1
            is_last = step == config.train.steps
            if _is_due(step, config.train.validate_every_steps) or (is_last and config.train.validate_every_steps):
                self._validate(step)
            if is_last or stopped or _is_due(step, config.checkpoint.every_steps):
                self._save(step)
        reason = None if step == config.train.steps else stopped
        self.recorder.event("finished" if reason is None else "stopped", step=step, reason=reason)
        return TrainResult(step, step * config.train.global_batch_tokens, reason, self.checkpoint)

    def _step(self, step: int, stop_requested: Callable[[], StopReason | None]) -> StopReason | None:
        """Runs optimizer step `step`, counted from 0, records it, and returns what the ranks agreed on."""
        begin = perf_counter()
        config = self.run.config
        microbatches = self._microbatches(step)
        data_s = perf_counter() - begin
        reason = stop_requested()
        tallies = [float(reason == r) for r in _STOP_REASONS] + self._tokens_by_language(microbatches)
        factor = lr_factor(config.optim.schedule, step=step, total_steps=config.train.steps)
        result = train_step(self.run, microbatches, lr_factor=factor, tallies=tallies)
        self._record(step + 1, result, step_s=perf_counter() - begin, data_s=data_s)
        agreed: list[StopReason] = [r for r, votes in zip(_STOP_REASONS, result.totals, strict=False) if votes]
        return agreed[0] if agreed else None

    def _microbatches(self, step: int) -> list[Batch]:
        """This rank's rows of the global batch, whose order does not depend on the number of ranks."""
        resolved = self.run.resolved
        first = self.run.mesh.data_rank * resolved.sequences_per_rank
        size = resolved.gather_sequences
        return [
            self.data.batch(step, range(first + i * size, first + (i + 1) * size))
            for i in range(resolved.accumulation_steps)
        ]

    def _tokens_by_language(self, microbatches: list[Batch]) -> list[float]:
        drawn = [language for batch in microbatches for language in batch.languages]
        tokens = self.run.config.data.seq_len // self.run.mesh.cp
        return [float(drawn.count(language) * tokens) for language in self.languages]

    def _record(self, step: int, result: StepResult, *, step_s: float, data_s: float) -> None:
        memory = self.watch.read()
        rates = self.run.optimizers.learning_rates
        batch_tokens = self.run.config.train.global_batch_tokens
        load = tuple(tuple(n / max(1, sum(layer)) for n in layer) for layer in result.expert_counts)
        imbalance = tuple(max(layer) * len(layer) for layer in load)
        by_language = result.totals[len(_STOP_REASONS) :]
        self.recorder.step(
            StepRecord(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=rates["adamw"],
                muon_lr=rates.get("muon"),
                tokens=step * batch_tokens,
                tokens_per_s=batch_tokens / step_s,
                step_s=step_s,
                data_s=data_s,
                aux_loss=result.balance_loss,
                z_loss=result.z_loss,
                peak_allocated_bytes=memory.allocated_bytes,
                peak_reserved_bytes=memory.reserved_bytes,
                stranded_bytes=memory.stranded_bytes,
                num_alloc_retries=memory.num_alloc_retries,
                expert_imbalance=max(imbalance, default=None),
                expert_imbalance_by_layer=imbalance,
                expert_load=load,
                max_attention_logit=result.max_attention_logit,
                clipped_heads=result.clipped_heads,
                tokens_by_language={
                    language: int(tokens) for language, tokens in zip(self.languages, by_language, strict=True)
                },
            )
        )

    def _validate(self, step: int) -> None:
        if not self.held_out.languages or self.run.config.train.validate_every_steps is None:
            return
        record = validate(
            self.run,
            self.held_out,
            token_bytes=self.token_bytes,
            step=step,
            progress=self.recorder.progress,
        )
        self.recorder.validation(record)

    def _save(self, step: int) -> None:
        self.recorder.progress(f"saving step {step}")
        begin = perf_counter()
        self.checkpoint = store.save(
            self.run_dir,
            step=step,
            tensors=self.run.named_tensors(),
            progress={"step": step, "seed": self.run.config.seed},
            world=self.run.world,
            keep=self.run.config.checkpoint.keep,
            host_bytes=host_bytes_of_rank(self.run.world),
        )
        self.recorder.event("saved", step=step, path=str(self.checkpoint), seconds=perf_counter() - begin)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
