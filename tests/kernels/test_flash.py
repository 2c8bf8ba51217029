"""Which flash kernels are taken, and what is said where those asked for are not to be had."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import attention

from amalthea.core.errors import ConfigError
from amalthea.kernels import flash
from amalthea.kernels.flash import choose_flash_attention, use_flash_attention

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch see a GPU of a capability, with or without the package."""

    def make(capability: tuple[int, int], *, installed: bool) -> None:
        found = ModuleSpec("flash_attn_interface", None) if installed else None
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: found)

    return make


def test_auto_takes_the_third_version_on_hopper_where_it_is_installed(machine: Any) -> None:
    assert choose_flash_attention("auto", CPU) == "torch"
    for capability, installed, chosen in (((9, 0), True, "fa3"), ((9, 0), False, "torch"), ((8, 0), True, "torch")):
        machine(capability, installed=installed)
        assert choose_flash_attention("auto", GPU) == chosen
        assert choose_flash_attention("torch", GPU) == "torch"


def test_what_was_asked_for_and_cannot_be_had_is_an_error(machine: Any) -> None:
    with pytest.raises(ConfigError, match=r"flash_attention is fa3, but this run is on a cpu.*flash_attention=auto"):
        choose_flash_attention("fa3", CPU)
    machine((8, 0), installed=True)
    with pytest.raises(ConfigError, match=r"compute capability 8\.0"):
        choose_flash_attention("fa3", GPU)
    machine((9, 0), installed=False)
    with pytest.raises(ConfigError, match=r"flash_attn_interface .* is not installed"):
        choose_flash_attention("fa3", GPU)
    machine((9, 0), installed=True)
    assert choose_flash_attention("fa3", GPU) == "fa3"


def test_torch_knows_the_name_by_which_it_is_asked() -> None:
    assert "FA3" in attention.list_flash_attention_impls()


def test_a_package_without_its_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's own registration, with an empty module in the package's place."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    with pytest.raises(ConfigError, match=r"flash_attn_interface does not load: .*flash_attention=torch"):
        use_flash_attention("fa3")
    use_flash_attention("torch")
    assert attention.current_flash_attention_impl() is None
