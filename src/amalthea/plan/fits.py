"""Whether a run can fit at all: a lower bound of its memory, by arithmetic, before anything is built.

The bound holds what lies in memory for the whole step (parameters, gradients, optimizer state), the boundaries that
forward keeps, and one layer's gathered parameters. It leaves out activations, communication buffers and fragmentation,
so what it refuses cannot run; what it lets pass may still run out. An *estimate*.

Shape legend: T tokens that a rank takes under one gather, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from amalthea.config.check import ResolvedRun, resolve
from amalthea.config.overrides import apply_overrides
from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError
from amalthea.core.units import GIB, format_bytes
from amalthea.plan.accounting import BF16_BYTES, FP32_BYTES, ParamsByPart, account

_CHANGES: tuple[tuple[str, ...], ...] = (
    ("memory.recompute=block",),
    ("memory.offload=true", "memory.recompute=block"),
    ("memory.blocks_per_group=2", "memory.recompute=block"),
    ("memory.sequences_per_gather=1",),
    ("train.microbatch_sequences=1",),
    ("memory.offload_optimizer=true",),
    ("optim.muon.momentum_dtype=bf16",),
    ("memory.offload=true", "memory.recompute=block", "memory.offload_optimizer=true"),
    (
        "memory.offload=true",
        "memory.recompute=block",
        "memory.offload_optimizer=true",
        "optim.muon.momentum_dtype=bf16",
    ),
)
"""Changes that save memory, the cheapest in time first."""

_LAST_CHANGES: tuple[tuple[str, ...], ...] = (
    ("memory.offload_parameters=true",),
    ("memory.offload_parameters=true", "memory.offload_optimizer=true"),
    (
        "memory.offload=true",
        "memory.recompute=block",
        "memory.offload_optimizer=true",
        "memory.offload_parameters=true",
    ),
)
"""What moves most, for when nothing else helps."""


@dataclass(frozen=True)
class Floor:
    """Bytes of the rank that holds most, by class; no run of this configuration takes less."""

    parameters: int
    gradients: int
    optimizer: int
    boundaries: int
    gathered: int
    host: int
    """Boundaries, optimizer state, parameters and gradients that lie in host memory."""

    @property
    def by_class(self) -> dict[str, int]:
        """Of the device."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "host"}

    @property
    def device(self) -> int:
        return sum(self.by_class.values())


def memory_floor(config: RunConfig, resolved: ResolvedRun) -> Floor:
    """Counts it. Communication: none. Source: ours; `plan/accounting.py` for the parameters."""
    counted = account(config.model, seq_len=config.data.seq_len, optim=config.optim)
    state, ranks = counted.state_bytes, resolved.fsdp
    momentum = state.muon_momentum_fp32 // (1 if config.optim.muon.momentum_dtype == "fp32" else 2)
    owners = ranks * (resolved.dp_replicate if config.optim.replicas == "owning" else 1)
    optimizer = momentum // owners + state.adamw_moments_fp32 // ranks
    parameters, gradients = state.parameters_fp32 // ranks, state.gradients_fp32 // ranks
    kept, away = _boundaries(config, resolved)
    host = away
    if config.memory.offload_optimizer:
        host, optimizer = host + optimizer, 0
    if config.memory.offload_parameters:
        host, parameters, gradients = host + parameters + gradients, 0, 0
    return Floor(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        boundaries=kept,
        gathered=_gathered(config, resolved, counted.params_by_part),
        host=host,
    )


def width_bytes(config: RunConfig) -> int:
    """Of a number as the model computes with it."""
    return BF16_BYTES if config.precision == "bf16" else FP32_BYTES


def check_fits(config: RunConfig, resolved: ResolvedRun, device_bytes: int, host_bytes: int) -> None:
    """Raises ConfigError where not even the lower bound fits into a rank's device or host memory.

    The line names the largest class and up to three changes, the cheapest first, with which the bound would fit.
    `device_bytes` is what the process may take, `host_bytes` this rank's share of what is free. Communication: none.
    """
    floor = memory_floor(config, resolved)
    problems = []
    if floor.device > device_bytes:
        largest = max(floor.by_class, key=lambda name: floor.by_class[name])
        problems.append(
            f"this configuration needs at least {format_bytes(floor.device)} of device memory on a rank, which has "
            f"{format_bytes(device_bytes)}; most is {largest}, {format_bytes(floor.by_class[largest])}"
        )
    if floor.host > host_bytes:
        problems.append(
            f"this configuration needs at least {format_bytes(floor.host)} of host memory on a rank, which has "
            f"{format_bytes(host_bytes)}"
        )
    if problems:
        remedies = remedies_that_fit(config, resolved, device_bytes, host_bytes)
        raise ConfigError(f"{'; '.join(problems)}; {advice(floor.device, device_bytes, remedies)}")


def remedies_that_fit(
    config: RunConfig, resolved: ResolvedRun, device_bytes: int, host_bytes: int, *, pass_bytes: int = 0
) -> tuple[tuple[str, ...], ...]:
    """Up to three sets of overrides, the cheapest in time first, with which the lower bound fits.

    `pass_bytes`, a pass's activations where they are known, come on top: in proportion to its tokens, and of one group
    of blocks at a time where these are recomputed.
    """
    tokens = resolved.pass_tokens(config.data.seq_len)
    found: list[tuple[str, ...]] = []
    for overrides in (*_CHANGES, *_replica_changes(resolved), *_context_changes(config, resolved), *_LAST_CHANGES):
        changed = _changed(config, resolved, overrides)
        if changed is None:
            continue
        floor = memory_floor(*changed)
        is_wider = any(set(other) <= set(overrides) for other in found)
        of_pass = pass_bytes * changed[1].pass_tokens(config.data.seq_len) / tokens
        if config.memory.recompute == "none" != changed[0].memory.recompute:
            of_pass *= changed[0].memory.blocks_per_group / config.model.num_layers
        device = floor.device + of_pass
        if device <= device_bytes and floor.host <= host_bytes and not is_wider:
            found.append(overrides)
    return tuple(found[:3])


def remedies_for_step(
    config: RunConfig,
    resolved: ResolvedRun,
    device_bytes: int,
    host_bytes: int,
    *,
    peak_bytes: int,
    pass_bytes: int,
) -> tuple[tuple[str, ...], ...]:
    """As `remedies_that_fit`, with what a step of this peak needs beyond the bound added to that of each change."""
    beyond = max(0, peak_bytes - memory_floor(config, resolved).device - pass_bytes)
    return remedies_that_fit(config, resolved, device_bytes - beyond, host_bytes, pass_bytes=pass_bytes)


def _boundaries(config: RunConfig, resolved: ResolvedRun) -> tuple[int, int]:
    """Bytes on the device and on the host: of groups' inputs, or of blocks' without recompute, which keep more."""
    memory = config.memory
    one = resolved.gather_tokens(config.data.seq_len) * config.model.hidden_size * width_bytes(config)
    per_group = memory.blocks_per_group if memory.recompute != "none" else 1
    groups = -(-config.model.num_layers // per_group)
    if not memory.offload:
        return groups * one, 0
    away = (groups - 1) * one
    if memory.offload_budget_gib is not None:
        away = min(away, int(memory.offload_budget_gib * GIB))
    return groups * one - away, away


def _gathered(config: RunConfig, resolved: ResolvedRun, parts: ParamsByPart) -> int:
    """One group of blocks as it computes."""
    if resolved.fsdp == 1 and not config.memory.offload_parameters:
        return 0
    layers, moe_layers = config.model.num_layers, config.model.num_layers - config.model.num_dense_layers
    of_layer = (parts.attention + parts.norms) // layers
    if moe_layers:
        of_layer += (parts.routed_experts // resolved.ep + parts.shared_experts + parts.router) // moe_layers
    return config.memory.blocks_per_group * of_layer * width_bytes(config)


def _replica_changes(resolved: ResolvedRun) -> Iterator[tuple[str, ...]]:
    """Fewer replicas share a model among more ranks."""
    for fewer in range(resolved.dp_replicate - 1, 0, -1):
        if resolved.dp_replicate % fewer == 0:
            yield (f"parallel.dp_replicate={fewer}", "parallel.dp_shard=auto")


def _context_changes(config: RunConfig, resolved: ResolvedRun) -> Iterator[tuple[str, ...]]:
    """Ranks that share sequences hold less of each: more passes of fewer tokens, or a smaller batch."""
    passes = config.memory.sequences_per_gather
    for cp in (2, 4, 8, 16):
        if resolved.cp == 1 and resolved.fsdp % cp == 0:
            yield (f"parallel.cp={cp}", "parallel.dp_shard=auto", f"memory.sequences_per_gather={passes * cp}")
    for cp in (2, 4, 8, 16):
        if resolved.cp == 1 and resolved.fsdp % cp == 0 and resolved.sequences_per_rank == resolved.gather_sequences:
            batch = config.train.global_batch_tokens // cp
            yield (f"parallel.cp={cp}", "parallel.dp_shard=auto", f"train.global_batch_tokens={batch}")


def _changed(
    config: RunConfig, resolved: ResolvedRun, overrides: tuple[str, ...]
) -> tuple[RunConfig, ResolvedRun] | None:
    """The configuration with `overrides`; none where it contradicts itself or nothing changes."""
    try:
        changed = apply_overrides(config, overrides)
        if changed == config:
            return None
        return changed, resolve(changed, world_size=resolved.world_size)
    except ConfigError:
        return None


def advice(needed_bytes: int, device_bytes: int, remedies: tuple[tuple[str, ...], ...]) -> str:
    """What to do, in words: the remedies, or how many more GPUs to take."""
    if remedies:
        return f"would fit: {', or '.join(' '.join(overrides) for overrides in remedies)}"
    times = needed_bytes / max(1, device_bytes)
    return f"no memory setting is enough; take about {max(2.0, times):.0f} times as many GPUs, or a smaller model"
