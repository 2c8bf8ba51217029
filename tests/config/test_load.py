"""`config.json`: read back exactly, refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.configs import small_config

from amalthea.config.load import config_to_json, load_config
from amalthea.core.errors import ConfigError


def test_a_run_folder_gives_its_configuration_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_to_json(small_config()))
    assert load_config(tmp_path) == small_config() == load_config(tmp_path / "config.json")


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json does not exist; expected the folder of a run"):
        load_config(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_to_json(small_config())[:-20])
    with pytest.raises(ConfigError, match=r"config.json is not JSON"):
        load_config(tmp_path)


def test_what_this_version_does_not_know_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    values = json.loads(config_to_json(small_config()))
    values["train"]["stepz"] = values["train"].pop("steps")
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert any("unknown key train.stepz; did you mean train.steps?" in problem for problem in caught.value.problems)
    assert any("train.steps is missing" in problem for problem in caught.value.problems)
