"""Who held the memory when it ran out.

A *holder* is something that holds device memory, by the best name there is: of a parameter, gradient or optimizer
state; of the module and operation that made an activation, where storages are tracked (`memory.track`); shape and dtype
otherwise.
"""

from __future__ import annotations

import gc
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from amalthea.core.errors import TrainingError
from amalthea.core.pieces import Pieces
from amalthea.core.units import format_bytes
from amalthea.memory.config import MemoryConfig
from amalthea.memory.monitor import PeakMemory, peak_memory
from amalthea.memory.tracker import StorageTracker

NUM_HOLDERS = 10
"""Named in the message."""

_HOST_MESSAGES = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory", "std::bad_alloc")


class OutOfMemoryError(TrainingError):
    """The device, or the host where it is the device, has no memory for what the run wants."""


@dataclass(frozen=True)
class Holder:
    """`count` storages of one name; `num_bytes` all together."""

    name: str
    num_bytes: int
    count: int = 1


@dataclass(frozen=True)
class Snapshot:
    """Memory at the moment of failure, largest holders first.

    `stranded_by_stream` is, on a GPU, what lies free in segments in use, which no other stream can have.
    """

    rank: int
    request: str
    peak: PeakMemory
    holders: tuple[Holder, ...]
    stranded_by_stream: dict[str, int]
    setting: str

    def describe(self, path: Path) -> str:
        largest = ", ".join(_in_words(holder) for holder in self.holders[:NUM_HOLDERS])
        return (
            f"rank {self.rank} ran out of memory ({self.request}); largest holders: {largest}; "
            f"{self.setting}; all holders are in {path}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a request for memory failed, on a GPU or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _HOST_MESSAGES)


def take_snapshot(
    error: BaseException,
    *,
    rank: int,
    device: torch.device,
    named: Mapping[str, torch.Tensor],
    config: MemoryConfig,
    tracker: StorageTracker | None = None,
) -> Snapshot:
    """Holders of the device's memory as they are now."""
    names = {storage._cdata: (name, storage.nbytes()) for name, storage in _storages(named, device)}
    if tracker is not None:
        others = _tracked(tracker, names)
    else:
        others = _visible(names, device)
    holders = [Holder(name, num_bytes) for name, num_bytes in names.values()] + list(others)
    if device.type == "cuda" and (rest := torch.cuda.memory_allocated(device) - sum(h.num_bytes for h in holders)) > 0:
        holders.append(Holder("activations and buffers without a name", rest))
    holders.sort(key=lambda holder: -holder.num_bytes)
    return Snapshot(
        rank=rank,
        request=_request(error),
        peak=peak_memory(device, tracker),
        holders=tuple(holders),
        stranded_by_stream=stranded_by_stream(torch.cuda.memory_snapshot(device)) if device.type == "cuda" else {},
        setting=setting_to_change(config),
    )


def stranded_by_stream(segments: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Free bytes inside segments that are partly in use, by stream, from `torch.cuda.memory_snapshot()`."""
    stranded: dict[str, int] = defaultdict(int)
    for segment in segments:
        if segment["active_size"]:
            stranded[str(segment["stream"])] += segment["total_size"] - segment["active_size"]
    return dict(stranded)


def setting_to_change(config: MemoryConfig) -> str:
    """The next lever to pull, the cheapest first."""
    if config.recompute == "none":
        return "set memory.recompute=block"
    if not config.offload:
        return "set memory.offload=true, or lower train.microbatch_sequences"
    switches = {"offload_optimizer": config.offload_optimizer, "offload_parameters": config.offload_parameters}
    further = "".join(f"set memory.{name}=true, " for name, is_set in switches.items() if not is_set)
    return f"lower train.microbatch_sequences, raise memory.blocks_per_group, {further}or take more ranks"


def _request(error: BaseException) -> str:
    text = " ".join(str(error).split())
    found = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", text)
    if found is None:
        return text[:120] or type(error).__name__
    amount = found[1].removesuffix(" bytes")
    return f"asked for {format_bytes(int(amount)) if amount.isdigit() else amount}"


def _in_words(holder: Holder) -> str:
    times = f" in {holder.count}" if holder.count > 1 else ""
    return f"{holder.name} {format_bytes(holder.num_bytes)}{times}"


def _storages(tensors: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """This rank's storages of named tensors, without those that rest in host memory while the device is another."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Pieces):
            parts = [piece.tensor for piece in tensor.pieces]
        else:
            # Not `to_local`: on the failing path no operation shall run.
            parts = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor]
        yield from ((name, part.untyped_storage()) for part in parts if part.device.type == device.type)


def _tracked(tracker: StorageTracker, names: Mapping[int, Any]) -> Iterator[Holder]:
    """What no name covers, together where module, operation, shape and dtype are alike."""
    alike: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for holding in tracker.holdings():
        storage = holding.storage()
        if storage is None or storage._cdata in names:
            continue
        maker = f"{holding.module} {holding.operation}".strip()
        label = f"{maker} {_shape(holding.shape, holding.dtype)}"
        alike[label] += 1
        sizes[label] += holding.num_bytes
    return (Holder(label, num_bytes, alike[label]) for label, num_bytes in sizes.items())


def _visible(names: Mapping[int, Any], device: torch.device) -> Iterator[Holder]:
    """Tensors that Python still knows; activations that only autograd holds are not among them."""
    seen = set(names)
    for item in gc.get_objects():
        if type(item) is not torch.Tensor or item.device.type != device.type or item.layout != torch.strided:
            continue
        storage = item.untyped_storage()
        if storage._cdata not in seen and storage.nbytes():
            seen.add(storage._cdata)
            yield Holder(_shape(item.shape, item.dtype), storage.nbytes())


def _shape(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
