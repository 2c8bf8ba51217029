"""What a run was started with: `config.json` and `manifest.json` in its folder."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import amalthea
from amalthea.config.check import ResolvedRun
from amalthea.config.load import CONFIG_FILE, config_to_json, differing_keys, load_config
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.world import World

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"

FIXED_KEYS = ("seed", "precision", "model", "data", "optim", "train.global_batch_tokens")
"""Keys and groups that make a run what it is: a resumed run has the same. The order of samples hangs on the
batch too, so a change of it would repeat some and skip others."""
FREE_KEYS = ("optim.replicas",)
"""Keys of those groups that only say who computes what, as the mesh does."""

_PACKAGES = (
    "torch", "numpy", "pydantic", "typer", "rich", "tokenizers", "matplotlib", "tensorboard", "platformdirs",
    "transformers", "safetensors", "wandb",
)  # fmt: skip


def write_manifest(
    run_dir: Path,
    *,
    config: RunConfig,
    resolved: ResolvedRun,
    world: World,
    chosen: dict[str, Any],
    data_checksum: str | None = None,
) -> None:
    """Write both files, each whole or not at all; the manifests of earlier starts move to `previous_starts`.

    `chosen` is what each `auto` became, `data_checksum` that of the prepared corpus. Neither the host's name nor
    the user's is written.

    Raises:
        ConfigError: the folder holds another run (see `check_same_run`).
        OSError: it cannot be written.
    """
    check_same_run(run_dir, config, data_checksum=data_checksum)
    manifest = {
        "recipe": config.recipe,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": config.seed,
        "device": world.device,
        "world": {"size": world.size, "local_size": world.local_size},
        "layout": asdict(resolved),
        "data_checksum": data_checksum,
        "chosen": chosen,
        "versions": package_versions(),
        "git": git_revision(Path(amalthea.__file__).parent),
    }
    manifest["previous_starts"] = _earlier_starts(run_dir / MANIFEST_FILE)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / MANIFEST_FILE, json.dumps(manifest, indent=2) + "\n")
    write_whole(run_dir / CONFIG_FILE, config_to_json(config))


def check_writable(run_dir: Path) -> None:
    """Refuse a run folder that cannot be made or written, before anything is done.

    Raises:
        ConfigError: naming the folder or file in the way.
    """
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--run-dir {run_dir}: {existing} is a file, not a folder; name another --run-dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--run-dir {run_dir}: {existing} cannot be written; give write access or name another")


def check_same_run(run_dir: Path, config: RunConfig, *, data_checksum: str | None = None) -> None:
    """Refuse to go on in a folder whose run has another model, data, seed or optimizer.

    Raises:
        ConfigError: naming each key of `FIXED_KEYS` that differs, with both values; or the text behind `data.path`
            is no longer what the run was trained on.
    """
    if not (run_dir / CONFIG_FILE).exists():
        return
    before = load_config(run_dir)
    differing = [key for key in differing_keys(before, config) if _is_fixed(key)]
    if differing:
        changes = ", ".join(f"{key} {_value(before, key)} → {_value(config, key)}" for key in differing)
        raise ConfigError(f"{run_dir} holds another run: {changes}; name another --run-dir or keep these settings")
    checksums = [start.get("data_checksum") for start in _earlier_starts(run_dir / MANIFEST_FILE)]
    if data_checksum and checksums and checksums[-1] not in (None, data_checksum):
        raise ConfigError(
            f"{run_dir} was trained on other text than data.path {config.data.path} holds now; bring that text back "
            "or name another --run-dir"
        )


def package_versions() -> dict[str, str]:
    """Of Python, this package and those it works with, as far as they are installed."""
    versions = {"python": platform.python_version(), "amalthea": amalthea.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_revision(source: Path) -> dict[str, Any] | None:
    """Commit of the working tree that tracks `source`, and whether `source` differs from it; else none."""
    # An installed copy may lie inside somebody else's repository, whose revision says nothing about it.
    if _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    revision = _git(source, "rev-parse", "HEAD")
    changes = _git(source, "status", "--porcelain", "--", ".")
    return None if revision is None else {"revision": revision, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _is_fixed(key: str) -> bool:
    return key not in FREE_KEYS and any(key == fixed or key.startswith(fixed + ".") for fixed in FIXED_KEYS)


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _earlier_starts(path: Path) -> list[dict[str, Any]]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError:
        raise ConfigError(f"{path} is not JSON; restore it or move it away to go on with this run") from None
    return [*manifest.pop("previous_starts", []), manifest]


def write_whole(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that what was there stays until the new one is whole. Raises OSError."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
