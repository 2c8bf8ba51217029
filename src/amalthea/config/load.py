"""A `RunConfig` to and from the run folder's `config.json`, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from amalthea.config.explain import explain
from amalthea.config.run import RunConfig
from amalthea.core.component import Component
from amalthea.core.errors import ConfigError

CONFIG_FILE = "config.json"


def config_to_json(config: RunConfig) -> str:
    """Every setting, defaults included, so that a later version with other defaults reads the same run."""
    return config.model_dump_json(indent=2) + "\n"


def load_config(path: Path) -> RunConfig:
    """The configuration in `path`, a `config.json` or a run folder that holds one.

    Raises:
        ConfigError: the file is missing, is not JSON, or holds what this version does not know.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        return RunConfig.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; expected the folder of a run that was started") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise ConfigError(f"{file} is not JSON: {first.get('ctx', {}).get('error')}") from None
        raise ConfigError(*(f"{file}: {line}" for line in explain(error))) from None


def flatten(config: Component, *, prefix: str = "") -> dict[str, Any]:
    """`{"optim.adamw.lr": 3e-4, …}`: each key with its value, in the order of declaration."""
    flat: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Component):
            flat |= flatten(value, prefix=f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def differing_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Keys whose values differ."""
    before, after = flatten(old), flatten(new)
    return [key for key in after if before.get(key) != after[key]]
