"""Other people's Muon, unmodified from PyPI, each set up as its authors do; and where it can't be had, why.

They are installed into a folder of their own, never beside this project's dependencies.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Shard
from workload import Tensors

PACKAGES = ("muon-fsdp2==0.3.0", "torchtitan==0.3.0")
NOT_HAD = {
    "dion": "not on PyPI (looked for 'dion'): its repository is the only source, and nothing is fetched from there",
}


def install(folder: Path) -> None:
    """Puts the peers into `folder`, without their dependencies: these would bring another torch.

    Raises CalledProcessError where PyPI can't be reached.
    """
    missing = [package for package in PACKAGES if not list(folder.glob(f"{_wheel_name(package)}.dist-info"))]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *missing]
        subprocess.run(command, check=True)


def _wheel_name(package: str) -> str:
    name, _, version = package.partition("==")
    return f"{name.replace('-', '_')}-{version}"


def torch_muon(tensors: Tensors, settings: dict[str, Any]) -> Callable[[], None]:
    """`torch.optim.Muon` on row-sharded DTensors: every product of Newton-Schulz communicates."""
    optimizer = torch.optim.Muon(tensors.parameters.values(), **settings, adjust_lr_fn="match_rms_adamw")
    return optimizer.step


def muon_fsdp2(tensors: Tensors, settings: dict[str, Any]) -> Callable[[], None]:
    """muon-fsdp2: gathers each parameter to one rank in turn, scatters the result; compiles its Newton-Schulz.

    It takes stacks as they are, so experts go as stacks: far faster than one gather for each expert. (It scales a
    stack's update by its first two dims instead of the last two; that changes no time and no cosine.)
    """
    from muon_fsdp2 import Muon  # pyright: ignore[reportMissingImports]

    return Muon([dict(params=list(tensors.parameters.values()), use_muon=True, rms_scale=True, **settings)]).step


def torchtitan(tensors: Tensors, settings: dict[str, Any], *, layers_per_bucket: int) -> Callable[[], None]:
    """TorchTitan's `build_dist_muon`, as its Kimi K2 recipe uses it: whole experts, dense matrices owned.

    The recipe has two layers in a bucket (one all-to-all each way for each); 0 puts all layers into one.
    """
    shim_torchtitan_onto_cpu()
    from torchtitan.distributed.flex_shard import (  # pyright: ignore[reportMissingImports]
        BucketConfig,
        ComputeLayout,
        Owned,
        build_dist_muon,
    )

    names = list(tensors.parameters)
    per_expert = ComputeLayout(shardings_by_mesh_axis={"dp_shard": Shard(0)})
    owned = ComputeLayout(shardings_by_mesh_axis={"dp_shard": Owned()})
    layers = sorted({int(name.split(".")[1]) for name in names})
    size = layers_per_bucket or len(layers)
    buckets = [layers[i : i + size] for i in range(0, len(layers), size)]
    optimizer = build_dist_muon(
        [{"params": list(tensors.parameters.values()), "param_names": names}],
        compute_sharding_by_fqn={name: per_expert if ".experts." in name else owned for name in names},
        bucket_configs=[BucketConfig(patterns=tuple(f"blocks.{i}.*" for i in bucket)) for bucket in buckets],
        adjust_lr_fn="match_rms_adamw",
        **settings,
    )
    return optimizer.step


def shim_torchtitan_onto_cpu() -> None:
    """Lets `build_dist_muon` run on a CPU. Nothing of what it computes, packs or sends is touched.

    1. Its parent package would import the trainer's dependencies; an empty one stands in.
    2. It refuses any device but CUDA, by one check.
    3. It asks for CUDA's streams and events; torch's own stand-ins for the CPU do nothing, so work runs in the order
       of its calls, and its all-to-alls, which it starts on a second stream, overlap with nothing.
    """
    if "torchtitan.distributed" in sys.modules:
        return
    import torchtitan as package  # pyright: ignore[reportMissingImports]

    parent = types.ModuleType("torchtitan.distributed")
    parent.__path__ = [str(Path(path) / "distributed") for path in package.__path__]
    sys.modules["torchtitan.distributed"] = parent
    from torchtitan.distributed.flex_shard import (  # pyright: ignore[reportMissingImports]
        _optimizer_reshard_runtime as runtime,
    )
    from torchtitan.distributed.flex_shard import dist_muon  # pyright: ignore[reportMissingImports]

    stream = torch.cpu.Stream()
    device_module = types.SimpleNamespace(
        Stream=lambda **_: stream,
        Event=torch.cpu.Event,
        current_stream=lambda *_: stream,
        stream=lambda _: contextlib.nullcontext(),
    )
    dist_muon.DistMuon._validate_parameter_storage = lambda self: torch.device("cpu")
    runtime.torch = _Torch(device_module)  # type: ignore[assignment]


class _Torch:
    """torch, except for the device's module."""

    def __init__(self, device_module: Any) -> None:
        self.get_device_module = lambda _: device_module

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
