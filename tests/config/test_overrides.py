"""Overrides: typed values in, one line per problem out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.configs import small_config

from amalthea.config.explain import describe, explain, keys_of, suggest_keys
from amalthea.config.load import config_to_json, differing_keys, flatten
from amalthea.config.overrides import apply_overrides
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.model.config import ModelConfig, MoEConfig

BASE = small_config()


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(BASE, overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=1000", "train.steps", 1000),
        ("train.steps=1e3", "train.steps", 1000),
        ("train.steps=1_000", "train.steps", 1000),
        (" train.steps = 7 ", "train.steps", 7),
        ("optim.adamw.lr=3e-3", "optim.adamw.lr", 3e-3),
        ("optim.adamw.lr=1", "optim.adamw.lr", 1.0),
        ("train.max_grad_norm=none", "train.max_grad_norm", None),
        ("train.max_grad_norm=None", "train.max_grad_norm", None),
        ("checkpoint.every_steps=null", "checkpoint.every_steps", None),
        ("logging.wandb=true", "logging.wandb", True),
        ("logging.tensorboard=False", "logging.tensorboard", False),
        ("logging.tensorboard=off", "logging.tensorboard", False),
        ("parallel.dp_shard=auto", "parallel.dp_shard", "auto"),
        ("parallel.dp_shard=4", "parallel.dp_shard", 4),
        ("data.path=demo", "data.path", "demo"),
        ("data.path=123", "data.path", "123"),
        ("data.path=true", "data.path", "true"),
        ('data.path="in quotes"', "data.path", "in quotes"),
        ("data.path=a=b", "data.path", "a=b"),
        ("data.path=", "data.path", ""),
        ("data.tokenizer.path=x/tokenizer.json", "data.tokenizer.path", Path("x/tokenizer.json")),
        ("data.tokenizer.path=none", "data.tokenizer.path", None),
        ('data.weights={"bg": 1, "mt": 2.5}', "data.weights", {"bg": 1.0, "mt": 2.5}),
        ("optim.experts=adamw", "optim.experts", "adamw"),
    ],
)
def test_a_value_takes_the_type_of_its_key(override: str, key: str, value: Any) -> None:
    changed = flatten(apply_overrides(BASE, [override]))[key]
    assert changed == value
    assert type(changed) is type(value) or isinstance(value, Path)


def test_the_later_of_two_wins_and_the_base_stays() -> None:
    changed = apply_overrides(BASE, ["train.steps=20", "train.steps=30"])
    assert (BASE.train.steps, changed.train.steps) == (10, 30)
    assert differing_keys(BASE, changed) == ["train.steps"]
    with pytest.raises(ValidationError):
        changed.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optim.learning_rate=1", "unknown key optim.learning_rate; did you mean optim.adamw.lr or optim.muon.lr?"),
        ("lr=1", "unknown key lr; did you mean optim.adamw.lr or optim.muon.lr?"),
        ("steps=1", "unknown key steps; did you mean train.steps?"),
        ("train.step=1", "unknown key train.step; did you mean train.steps?"),
        ("modle.hidden_size=1", "unknown key modle.hidden_size; did you mean model.hidden_size?"),
        ("batch_size=1", "unknown key batch_size; did you mean train.global_batch_tokens?"),
        ("model.num_experts=1", "unknown key model.num_experts; did you mean model.moe.num_experts?"),
        ("data.weights.bg=1", "unknown key data.weights.bg; did you mean data.weights?"),
        ("optim.zzz=1", "unknown key optim.zzz; optim has experts, matrices, "),
        ("seed.deep.er=1", "unknown key seed.deep.er; the configuration has recipe, seed, device"),
    ],
)
def test_an_unknown_key_comes_with_what_was_probably_meant(override: str, meant: str) -> None:
    (problem,) = problems(override)
    assert problem.startswith(meant)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps=ten", "train.steps is 'ten'; expected a whole number above 0"),
        ("train.steps=0", "train.steps is 0; expected a whole number above 0"),
        ("train.steps=true", "train.steps is 'true'; expected a whole number above 0"),
        ("seed=1.5", "seed is 1.5; expected a whole number of at least 0"),
        ("train.max_grad_norm=-1", "train.max_grad_norm is -1; expected a number above 0, or none"),
        ("optim.adamw.beta1=1", "optim.adamw.beta1 is 1; expected a number of at least 0 and below 1"),
        ("optim.adamw.lr=Infinity", "optim.adamw.lr is Infinity; expected a number above 0"),
        ("data.temperature=NaN", "data.temperature is NaN; expected a number of at least 0"),
        ("optim.experts=sgd", "optim.experts is 'sgd'; expected muon or adamw"),
        ("device=gpu", "device is 'gpu'; expected auto, cpu or cuda"),
        ("parallel.dp_shard=atuo", "parallel.dp_shard is 'atuo'; expected a whole number above 0, or auto"),
        ("logging.wandb=maybe", "logging.wandb is 'maybe'; expected true or false"),
        ("train.steps=none", "train.steps is none; expected a whole number above 0"),
        ('data.weights={"bg": "x"}', "data.weights.bg is 'x'; expected a number"),
        ("optim.adamw=3", "optim.adamw is a group of settings; set one of them, like optim.adamw.lr=…"),
        ("train.steps", "'train.steps' is no override; write KEY=VALUE, like train.steps=100"),
        ("=3", "'=3' is no override; write KEY=VALUE, like train.steps=100"),
        ("model.moe.top_k=99", "model.moe: top_k is 99, more than num_experts 16; lower top_k"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(override: str, line: str) -> None:
    assert problems(override) == (line,)


def test_every_problem_is_reported_at_once() -> None:
    wrong = ["train.stepz=1", "seed=x", "optim.experts=sgd", "model.moe.top_k=99", "model.num_heads=3", "nonsense"]
    found = problems(*wrong)
    assert len(found) == len(wrong)
    assert any("num_heads 3 is not a multiple of num_kv_heads 2" in line for line in found)
    assert not any("\n" in line or "pydantic" in line or "Input should" in line for line in found)


def test_long_values_are_cut() -> None:
    (problem,) = problems("train.steps=" + "9" * 3 + "x" * 1000)
    assert len(problem) < 200


def test_every_key_can_be_suggested_from_a_slip_of_the_pen() -> None:
    for key in keys_of(RunConfig):
        if len(key.rpartition(".")[2]) > 3:
            assert key in suggest_keys(key[:-1] + "_"), key


def test_every_key_has_a_description_of_what_it_takes() -> None:
    assert describe(int, metadata=(Ge(1), Lt(5))) == "a whole number of at least 1 and below 5"
    for model in (RunConfig, ModelConfig, MoEConfig):
        for field in model.model_fields.values():
            assert "typing." not in describe(field.annotation, metadata=tuple(field.metadata))


def test_an_error_of_a_part_names_the_whole_key() -> None:
    with pytest.raises(ValidationError) as caught:
        MoEConfig(num_experts=0, top_k=1, expert_hidden_size=1)
    assert explain(caught.value) == ("model.moe.num_experts is 0; expected a whole number above 0",)
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate({"vocab_size": 3})
    assert "model.hidden_size is missing; expected a whole number above 0" in explain(caught.value)


def values_of(annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    """Any value that a setting takes."""
    if annotation in (int, float):
        low: float = 0
        high: float = 10**6
        for bound in metadata:
            low = bound.gt if isinstance(bound, Gt) else bound.ge if isinstance(bound, Ge) else low
            high = bound.lt if isinstance(bound, Lt) else bound.le if isinstance(bound, Le) else high
        if annotation is int:
            return st.integers(int(low) + 1, int(high))
        return st.floats(low, high, exclude_min=True, exclude_max=True)
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        return st.text()
    if annotation is Path:
        return st.text("abc/.", min_size=1).map(Path)
    if annotation is type(None):
        return st.none()
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is dict:
        return st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False))
    if hasattr(annotation, "__metadata__"):
        inner = annotation.__metadata__[0]
        return values_of(annotation.__origin__, getattr(inner, "metadata", [inner]))
    return st.one_of(*(values_of(arg, []) for arg in get_args(annotation)))


def field_of(key: str) -> Any:
    model: Any = RunConfig
    *groups, last = key.split(".")
    for group in groups:
        model = model.model_fields[group].annotation
    return model.model_fields[last]


@st.composite
def changed_configs(draw: st.DrawFn) -> RunConfig:
    """`BASE` with some settings changed at random, where the result is valid."""
    values = BASE.model_dump()
    for key in draw(st.lists(st.sampled_from(sorted(keys_of(RunConfig))), max_size=8, unique=True)):
        field = field_of(key)
        *groups, last = key.split(".")
        part = values
        for group in groups:
            part = part[group]
        before, part[last] = part[last], draw(values_of(field.annotation, field.metadata))
        try:
            RunConfig.model_validate(values)
        except ValidationError:
            part[last] = before  # it contradicts another setting
    return RunConfig.model_validate(values)


def as_override(key: str, value: Any) -> str:
    if isinstance(value, str | Path):
        return f"{key}={json.dumps(str(value))}"
    return f"{key}={json.dumps(value)}"


@settings(deadline=None)
@given(changed_configs())
def test_any_configuration_can_be_reached_by_overrides(config: RunConfig) -> None:
    flat = flatten(config)
    overrides = [as_override(key, flat[key]) for key in differing_keys(BASE, config)]
    assert apply_overrides(BASE, overrides) == config


@settings(deadline=None)
@given(changed_configs())
def test_json_gives_the_same_configuration_back(config: RunConfig) -> None:
    assert RunConfig.model_validate_json(config_to_json(config)) == config


@settings(deadline=None)
@given(st.sampled_from(sorted(keys_of(RunConfig))), st.text())
def test_any_text_is_taken_or_refused_in_one_line_each(key: str, text: str) -> None:
    found: tuple[str, ...] = ()
    try:
        apply_overrides(BASE, [f"{key}={text}"])
    except ConfigError as error:
        found = error.problems
    assert not any("\n" in line or "Input should" in line for line in found)
