"""Composes a run, in one order: mesh → model on meta → expert parallel → recompute → FSDP → weights → optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from amalthea.config.check import ResolvedRun, dispatch_node_ranks
from amalthea.config.run import RunConfig
from amalthea.core.tensors import DTYPES
from amalthea.core.world import World
from amalthea.flexshard.layout import Grid
from amalthea.kernels.fused import check_compiler
from amalthea.kernels.vocab_loss import chunk_tokens
from amalthea.memory.copies import Copies, copies_for
from amalthea.memory.offload import OffloadPlan, apply_offload, host_bytes_of_rank, plan_offload
from amalthea.memory.recompute import apply_recompute
from amalthea.memory.state import HostState, check_host_bytes
from amalthea.model.blocks import BlockGroup
from amalthea.model.init import initialize
from amalthea.model.transformer import Transformer
from amalthea.optim.build import Optimizers, Place
from amalthea.parallel.context import apply_context_parallel
from amalthea.parallel.experts import apply_expert_parallel
from amalthea.parallel.fsdp import allocate, apply_fsdp, experts_are_cut, set_unshard_async_op
from amalthea.parallel.hierarchical import apply_hierarchical_dispatch
from amalthea.parallel.mesh import Mesh, build_mesh
from amalthea.parallel.shards import local_part


@dataclass(frozen=True)
class Run:
    """What a step needs: the configuration and the placed, initialised parts."""

    config: RunConfig
    resolved: ResolvedRun
    world: World
    mesh: Mesh
    model: Transformer
    optimizers: Optimizers
    offload: OffloadPlan | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.world.torch_device)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds, by name: parameters, load-balance biases, optimizer state."""
        state = self.model.state_dict()
        if self.config.model.tie_embeddings:
            del state["head.weight"]
        model: dict[str, torch.Tensor] = {f"model.{name}": tensor for name, tensor in state.items()}
        return model | {f"optim.{name}": tensor for name, tensor in self.optimizers.named_state().items()}


def build(
    config: RunConfig,
    resolved: ResolvedRun,
    world: World,
    *,
    copies: Copies | None = None,
    host_bytes: int | None = None,
) -> Run:
    """Builds the run on this rank; every rank calls it together, with a default process group.

    `copies` moves boundaries, state and parameters to the host and back, by default the device's own engine;
    `host_bytes` is the host memory that one rank may take for them, by default its share of what is free.
    Communication: process groups of the mesh, and a comparison of plans. Memory: this rank's parameters and optimizer
    state. Raises PlacementError where ranks planned differently, and ConfigError where fused kernels are asked of a GPU
    for which this machine cannot compile.
    """
    device = torch.device(world.torch_device)
    if config.kernels == "fused" and device.type == "cuda":
        check_compiler(device)
    mesh = build_mesh(
        world,
        dp_replicate=resolved.dp_replicate,
        dp_shard=resolved.dp_shard,
        ep=resolved.ep,
        cp=resolved.cp,
        node_ranks=dispatch_node_ranks(config, local_size=world.local_size),
    )

    with torch.device("meta"):
        model = Transformer(config.model, blocks_per_group=config.memory.blocks_per_group)
    if config.memory.loss_budget_gib is not None:
        model.head.chunk_tokens = chunk_tokens(
            budget_gib=config.memory.loss_budget_gib,
            vocab_size=config.model.vocab_size,
            dtype=DTYPES[config.precision],
        )
    model.set_fused(config.kernels == "fused")
    for block in model.blocks:
        block.attn.track_max_logits = config.optim.qk_clip is not None
    for group in model.groups:
        cast(BlockGroup, group).sequences_per_pass = resolved.microbatch_sequences
    if resolved.ep > 1:
        apply_expert_parallel(model, mesh.experts["ep"], num_chunks=config.parallel.dispatch_chunks)
    if mesh.dispatch is not None:
        apply_hierarchical_dispatch(model, mesh.dispatch, num_chunks=config.parallel.dispatch_chunks)
    if resolved.cp > 1:
        apply_context_parallel(model, mesh.sequences["cp"])
    if config.memory.recompute != "none":
        apply_recompute(model, keep=config.memory.keep if config.memory.recompute == "selective" else ())
    offload = None
    copies = copies or copies_for(device)
    if host_bytes is None:
        host_bytes = host_bytes_of_rank(world)
    if config.memory.offload:
        offload = plan_boundary_offload(config, resolved, num_groups=len(model.groups), host_bytes=host_bytes)
        apply_offload(model, offload, dtype=DTYPES[config.precision], copies=copies)
        host_bytes -= offload.arena_bytes
    on_host = config.memory.offload_parameters
    if resolved.world_size > 1 or config.precision != "fp32" or on_host:
        # One fp32 process has nothing to gather, reduce or cast.
        apply_fsdp(
            model,
            mesh,
            param_dtype=DTYPES[config.precision],
            reduce_dtype=DTYPES[config.parallel.reduce_dtype],
            reshard_after_forward=config.parallel.reshard_after_forward,
            reduce_over_replicas=config.optim.replicas == "repeated",
            rest_on_host=on_host,
        )
        set_unshard_async_op(model, enabled=config.memory.unshard_async_op)

    if on_host:
        needed_bytes = 2 * sum(local_part(*named).tensor.nbytes for named in model.named_parameters())
        check_host_bytes("memory.offload_parameters", needed_bytes, host_bytes)
        host_bytes -= needed_bytes
    allocate(model, device, rest_on_host=on_host)
    initialize(model, seed=config.seed, part_of=local_part, draw_on=device)
    rest = None
    if config.memory.offload_optimizer or on_host:
        rest = HostState(
            copies,
            device=device,
            host_bytes=host_bytes,
            state=config.memory.offload_optimizer,
            parameters=on_host,
        )
    optimizers = build_optimizers(config, mesh, model, rest)
    optimizers.check_same_plan()
    return Run(config, resolved, world, mesh, model, optimizers, offload)


def plan_boundary_offload(config: RunConfig, resolved: ResolvedRun, *, num_groups: int, host_bytes: int) -> OffloadPlan:
    """How much travels to the host. Raises ConfigError where the host has less than that."""
    tokens = resolved.pass_tokens(config.data.seq_len)
    return plan_offload(
        num_groups=num_groups,
        num_passes=config.memory.sequences_per_gather,
        boundary_bytes=tokens * config.model.hidden_size * DTYPES[config.precision].itemsize,
        budget_gib=config.memory.offload_budget_gib,
        host_available_bytes=host_bytes,
    )


def build_optimizers(config: RunConfig, mesh: Mesh, model: Transformer, rest: HostState | None) -> Optimizers:
    """Plans who orthogonalizes what, and makes the state, by choice in host memory. Communication: none."""
    moe = config.model.moe
    place = Place(
        grid=Grid(mesh.dp_replicate, mesh.fsdp, mesh.ep),
        replica=mesh.dense.get_local_rank("dp_replicate"),
        rank=mesh.dense.get_local_rank("fsdp"),
        shard_group=mesh.dense.get_group("fsdp"),
        replica_group=mesh.dense.get_group("dp_replicate"),
        all_ranks=dist.group.WORLD,
        owning=mesh.dp_replicate > 1 and config.optim.replicas == "owning",
    )
    sizes = (moe.expert_hidden_size, config.model.hidden_size)
    return Optimizers(
        model.named_parameters(),
        config.optim,
        place=place,
        head_dim=config.model.head_dim,
        experts_by_rows=experts_are_cut(mesh, num_experts=moe.num_experts, sizes=sizes),
        rest=rest,
        offsets_of=lambda name, parameter: local_part(name, parameter).offsets,
    )
