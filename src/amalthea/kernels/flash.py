"""Which flash kernels attention on a GPU runs on: torch's own, or FlashAttention-3 where it is installed.

torch brings the second version. The third makes use of what Hopper GPUs have beyond older ones, and is a package of its
own (`flash_attn_interface`) that torch puts behind the same operators; nothing else changes.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from torch.nn.attention import activate_flash_attention_impl

from amalthea.core.errors import ConfigError

_MODULE = "flash_attn_interface"
_HOPPER = 9
"""Major compute capability."""


def choose_flash_attention(wanted: Literal["auto", "torch", "fa3"], device: torch.device) -> Literal["torch", "fa3"]:
    """What `auto` becomes on a device, and whether what was asked for can be had there.

    Raises ConfigError where FlashAttention-3 was asked for and the device is no Hopper GPU or the package is missing.
    """
    if wanted == "torch":
        return "torch"
    missing = _missing(device)
    if wanted == "fa3" and missing is not None:
        raise ConfigError(f"flash_attention is fa3, but {missing}; set flash_attention=auto or torch")
    return "torch" if missing is not None else "fa3"


def use_flash_attention(chosen: Literal["torch", "fa3"]) -> None:
    """For the whole process. Raises ConfigError where the package does not bring what torch asks of it."""
    if chosen == "torch":
        return
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"flash_attention is fa3, but {_MODULE} does not load: {error}; set flash_attention=torch"
        ) from None


def _missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"this run is on a {device.type}, and FlashAttention-3 needs a Hopper GPU (H100, H200, GH200)"
    major, minor = torch.cuda.get_device_capability(device)
    if major != _HOPPER:
        return f"this GPU has compute capability {major}.{minor}, and FlashAttention-3 needs {_HOPPER}.0 (Hopper)"
    if importlib.util.find_spec(_MODULE) is None:
        return f"the package {_MODULE} (FlashAttention-3) is not installed"
    return None
