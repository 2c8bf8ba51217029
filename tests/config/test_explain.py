"""What pydantic finds, said in our words, for any component."""

from __future__ import annotations

import pytest
from pydantic import PositiveInt, ValidationError

from amalthea.config.explain import explain
from amalthea.config.run import TrainConfig
from amalthea.core.component import Component


class Inner(Component):
    wheels: PositiveInt = 4


class Vehicle(Component):
    """A component that is no part of a run."""

    gears: PositiveInt
    inner: Inner = Inner()


def found(component: type[Component], values: dict[str, object], root: type[Component]) -> str:
    with pytest.raises(ValidationError) as caught:
        component.model_validate(values)
    return "\n".join(explain(caught.value, root=root))


def test_unknown_keys_are_compared_with_the_keys_of_their_own_component() -> None:
    line = found(Vehicle, {"gears": 5, "gear": 5}, Vehicle)
    assert line == "unknown key gear; did you mean gears?"
    assert found(Vehicle, {"gears": 5, "inner": {"wheel": 3}}, Vehicle) == (
        "unknown key inner.wheel; did you mean inner.wheels?"
    )


def test_nothing_alike_lists_the_components_own_keys() -> None:
    line = found(Vehicle, {"gears": 5, "zzz": 1}, Vehicle)
    assert line == "unknown key zzz; the configuration has gears, inner"


def test_a_part_of_a_run_is_told_whole_keys() -> None:
    from amalthea.config.run import RunConfig

    line = found(TrainConfig, {"steps": 1, "global_batch_tokens": 1, "step": 2}, RunConfig)
    assert line.startswith("unknown key train.step; did you mean train.steps")
