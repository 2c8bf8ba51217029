"""Pydantic's findings in our words: which key, what it got, what it expected, and what was probably meant.

A *key* is a dotted path such as `optim.adamw.lr`. A *group* is a key that holds further keys.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from amalthea.config.run import RunConfig
from amalthea.core.component import Component

OTHER_NAMES = {
    "learning_rate": "lr",
    "batch_size": "global_batch_tokens",
    "global_batch_size": "global_batch_tokens",
    "micro_batch_size": "microbatch_sequences",
    "batch_tokens": "global_batch_tokens",
    "max_steps": "steps",
    "num_steps": "steps",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_hidden_size",
    "intermediate_size": "dense_hidden_size",
    "sequence_length": "seq_len",
    "grad_clip": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "dtype": "precision",
    "warmup": "warmup_steps",
    "expert_parallel": "ep",
    "cpu_offload": "offload_parameters",
    "offload_params": "offload_parameters",
}
"""What other systems call our settings; helps the suggestions only."""

_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
_PLAIN_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def explain(error: ValidationError, *, root: type[Component] = RunConfig) -> tuple[str, ...]:
    """One plain line per key that `error` complains of, in the order in which pydantic found them."""
    prefix, model = _locate(error.title, root)
    lines: dict[str, str] = {}
    for finding in error.errors(include_url=False):
        key, line = _explain_one(finding, prefix, model, root)
        lines.setdefault(key, line)
    return tuple(lines.values())


def unknown_key(key: str, *, root: type[Component] = RunConfig) -> str:
    """The line for a key that does not exist, with up to three keys that may have been meant."""
    meant = suggest_keys(key, root=root)
    if meant:
        return f"unknown key {key}; did you mean {' or '.join(meant)}?"
    group, names = _nearest_group(key, root)
    return f"unknown key {key}; {group or 'the configuration'} has {', '.join(names)}"


def suggest_keys(key: str, *, root: type[Component] = RunConfig) -> list[str]:
    """Up to three keys close to `key`: by the whole path, by the last word, and among its siblings."""
    scored = sorted(((_likeness(key, known), known) for known in keys_of(root)), key=lambda pair: -pair[0])
    best = scored[0][0]
    return [known for score, known in scored if score >= max(0.7, best - 0.05)][:3]


def keys_of(model: type[Component], *, prefix: str = "") -> Iterator[str]:
    """Every key that can be set, groups left out."""
    for name, field in model.model_fields.items():
        inner = group_type(field.annotation)
        if inner is None:
            yield prefix + name
        else:
            yield from keys_of(inner, prefix=f"{prefix}{name}.")


def group_type(annotation: Any) -> type[Component] | None:
    """The component that an annotation holds, `None` where it is a plain setting."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Component):
            return candidate
    return None


def describe(annotation: Any, *, metadata: tuple[Any, ...] = ()) -> str:
    """`PositiveInt | None` → `a whole number above 0, or none`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "none"
    if origin is Annotated:
        return describe(args[0], metadata=args[1:])
    if origin is Literal:
        return _either([str(choice) for choice in args])
    if origin is dict:
        return f'a JSON object of names to numbers, like {{"bg": 1.0}}, each {describe(args[1])}'
    if args:
        return ", or ".join(describe(arg) for arg in args)
    words = [_PLAIN_TYPES.get(annotation, getattr(annotation, "__name__", str(annotation)))]
    for constraint in _constraints(metadata):
        words += [
            f"{phrase} {getattr(constraint, bound):g}"
            for bound, phrase in _BOUNDS.items()
            if getattr(constraint, bound, None) is not None
        ]
    return words[0] + (" " + " and ".join(words[1:]) if words[1:] else "")


def show(value: Any) -> str:
    """A value as one would type it, cut where it is long."""
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, bool) or value is None:
        text = str(value).lower()
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def settings_path(loc: tuple[int | str, ...], model: type[Component]) -> list[str]:
    """The part of a pydantic location that names settings."""
    return _follow(loc, model)[0]


def _explain_one(
    finding: Any, prefix: tuple[str, ...], model: type[Component], root: type[Component]
) -> tuple[str, str]:
    """The key that a finding is about, and its line."""
    path, field, owner, rest = _follow(finding["loc"], model)
    key = ".".join((*prefix, *path))
    match finding["type"]:
        case "extra_forbidden":
            unknown = ".".join((*prefix, *map(str, finding["loc"])))
            return unknown, unknown_key(unknown, root=root)
        case "value_error":
            reason = str(finding["ctx"]["error"])
            return key, f"{key}: {reason}" if key else reason
        case "missing":
            expected = describe(field.annotation, metadata=tuple(field.metadata)) if field else "a value"
            return key, f"{key} is missing; expected {expected}"
    if owner is not None or field is None:
        return key, f"{key or 'the configuration'} is {show(finding['input'])}; expected a group of settings"
    annotation = field.annotation
    if rest and (value_type := _dict_value_type(annotation)) is not None:
        key, annotation = f"{key}.{rest[-1]}", value_type
    expected = describe(annotation, metadata=tuple(field.metadata))
    return key, f"{key} is {show(finding['input'])}; expected {expected}"


def _follow(
    loc: tuple[int | str, ...], model: type[Component]
) -> tuple[list[str], FieldInfo | None, type[Component] | None, tuple[int | str, ...]]:
    """Walk a pydantic location as far as it names settings; what follows are branches of a union or entries."""
    path: list[str] = []
    field: FieldInfo | None = None
    owner: type[Component] | None = model
    for depth, part in enumerate(loc):
        if owner is None or part not in owner.model_fields:
            return path, field, owner, loc[depth:]
        field = owner.model_fields[str(part)]
        owner = group_type(field.annotation)
        path.append(str(part))
    return path, field, owner, ()


def _locate(title: str, root: type[Component]) -> tuple[tuple[str, ...], type[Component]]:
    """Where in `root` the component named `title` sits, so that an error of a part names whole keys."""
    queue: list[tuple[tuple[str, ...], type[Component]]] = [((), root)]
    for prefix, model in queue:
        if model.__name__ == title:
            return prefix, model
        for name, field in model.model_fields.items():
            inner = group_type(field.annotation)
            if inner is not None:
                queue.append(((*prefix, name), inner))
    return (), root


def _nearest_group(key: str, root: type[Component]) -> tuple[str, list[str]]:
    """The deepest group on the way to `key`, and the names in it."""
    path, _, owner, _ = _follow(tuple(key.split(".")), root)
    if owner is None:  # a plain setting lies on the way
        path, _, owner, _ = _follow(tuple(path[:-1]), root)
    assert owner is not None
    return ".".join(path), list(owner.model_fields)


def _likeness(key: str, known: str) -> float:
    """0 to 1, from the whole path, the last word (or its name in other systems), and a common parent."""
    parent, _, word = key.rpartition(".")
    known_parent, _, known_word = known.rpartition(".")
    words = max(_ratio(word, known_word), float(OTHER_NAMES.get(word) == known_word))
    same_group = parent == known_parent or (parent != "" and known_parent.startswith(parent + "."))
    return max(_ratio(key, known), words * (1.0 if same_group else 0.9))


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left.lower(), right.lower()).ratio()


def _constraints(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def _dict_value_type(annotation: Any) -> Any:
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is dict:
            return get_args(candidate)[1]
    return None


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
