"""`a.b=c` on the command line: typed values over a recipe's configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from amalthea.config.explain import explain, group_type, settings_path, unknown_key
from amalthea.config.run import RunConfig
from amalthea.core.component import Component
from amalthea.core.errors import ConfigError

_WORDS = {"none": None, "null": None, "true": True, "false": False}


def apply_overrides(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """`config` with each `key=value` set, a new value; the later of two for the same key wins.

    A value is read as JSON where it parses, else as text; `none`, `null`, `true` and `false` may be written in
    any case. A setting that holds text keeps what was typed.

    Raises:
        ConfigError: unknown keys (with suggestions), values of the wrong type or out of range, and values
            that contradict each other, all at once.
    """
    values = config.model_dump()
    problems: list[str] = []
    for text in overrides:
        try:
            key, value = _parse(text, type(config))
        except ConfigError as error:
            problems.extend(error.problems)
        else:
            _set(values, key, value)
    changed, contradictions = _validate(values, config)
    problems.extend(contradictions)
    if problems:
        raise ConfigError(*problems)
    return changed


def _validate(values: dict[str, Any], config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration of `values` and all that is wrong with it.

    Pydantic checks a group only once its parts are right. So what is wrong is put back to what `config` has,
    and the rest is checked again, until nothing more is found.
    """
    problems: list[str] = []
    while True:
        try:
            return type(config).model_validate(values), problems
        except ValidationError as error:
            problems.extend(explain(error, root=type(config)))
            for finding in error.errors():
                path = settings_path(finding["loc"], type(config))
                if not path:
                    return config, problems
                _put_back(values, config.model_dump(), path)


def _put_back(values: dict[str, Any], original: dict[str, Any], path: list[str]) -> None:
    *groups, last = path
    for name in groups:
        values, original = values[name], original[name]
    values[last] = original[last]


def _parse(text: str, root: type[Component]) -> tuple[str, Any]:
    """`train.steps=3` → (`train.steps`, 3)."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{text!r} is no override; write KEY=VALUE, like train.steps=100")
    return key, _read(raw, _field(key, root))


def _field(key: str, root: type[Component]) -> FieldInfo:
    """The setting that `key` names."""
    model, field = root, None
    *groups, last = key.split(".")
    for name in groups:
        inner = group_type(model.model_fields[name].annotation) if name in model.model_fields else None
        if inner is None:
            raise ConfigError(unknown_key(key, root=root))
        model = inner
    field = model.model_fields.get(last)
    if field is None:
        raise ConfigError(unknown_key(key, root=root))
    if (inner := group_type(field.annotation)) is not None:
        example = f"{key}.{next(iter(inner.model_fields))}=…"
        raise ConfigError(f"{key} is a group of settings; set one of them, like {example}")
    return field


def _read(raw: str, field: FieldInfo) -> Any:
    """The first reading of `raw` that the setting takes; the plainest one where it takes none."""
    readings = _readings(raw)
    annotated: Any = Annotated
    adapter: TypeAdapter[Any] = TypeAdapter(annotated[(field.annotation, "a setting", *field.metadata)])
    for reading in readings:
        try:
            value = adapter.validate_python(reading)
        except ValidationError:
            continue
        if isinstance(reading, bool) and not isinstance(value, bool):
            continue  # pydantic would take `true` for the number 1
        return reading
    return raw if isinstance(readings[0], bool) else readings[0]


def _readings(raw: str) -> list[Any]:
    """What `raw` may mean, in order of preference; the text itself comes last."""
    word = raw.strip().lower()
    if word in _WORDS:
        return [_WORDS[word], raw]
    try:
        return [json.loads(raw), raw]
    except (ValueError, RecursionError):
        return [raw]


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    for name in groups:
        values = values[name]
    values[last] = value
