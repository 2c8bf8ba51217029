"""The base of every configuration: frozen, and closed to unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Component(BaseModel):
    """A frozen configuration that lives beside the code it configures and checks itself."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,  # JSON has neither, so such a configuration could not be read back
    )
