"""Tools that draw a run while it goes on: TensorBoard and, offline, Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from amalthea.config.run import LoggingConfig
from amalthea.core.errors import MissingDependencyError


class Tracker(Protocol):
    """Takes scalars by name and step to a tool that draws them."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_trackers(run_dir: Path, *, logging: LoggingConfig, resumed_step: int) -> tuple[Tracker, ...]:
    """The trackers that the configuration asks for, in `run_dir`; what is not asked for is not imported."""
    trackers: list[Tracker] = []
    if logging.tensorboard:
        trackers.append(TensorBoardTracker(run_dir / "tensorboard", resumed_step=resumed_step))
    if logging.wandb:
        trackers.append(WandbTracker(run_dir, resumed_step=resumed_step))
    return tuple(trackers)


class TensorBoardTracker:
    """Event files for TensorBoard; on resume TensorBoard is told to forget what came after the checkpoint."""

    def __init__(self, folder: Path, *, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard purges the purge step itself too, and the validation of the resumed step shall stay.
        purge_step = resumed_step + 1 if resumed_step else 0
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """An offline W&B run in `run_dir/wandb`, one for each start; `wandb sync` uploads it from elsewhere."""

    def __init__(self, run_dir: Path, *, resumed_step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        config = run_dir / "config.json"
        self._run = wandb.init(
            project="amalthea",
            group=run_dir.name,
            name=f"{run_dir.name} from step {resumed_step}",
            config=json.loads(config.read_text(encoding="utf-8")) if config.exists() else None,
            dir=run_dir,
            mode="offline",
            settings=wandb.Settings(console="off", silent=True),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def check_wandb() -> None:
    """Raises MissingDependencyError unless W&B is installed; imports nothing."""
    if importlib.util.find_spec("wandb") is None:
        raise MissingDependencyError(
            "logging.wandb is on but the package wandb is not installed; "
            "`pip install 'amalthea[wandb]'`, or set logging.wandb=false"
        )
