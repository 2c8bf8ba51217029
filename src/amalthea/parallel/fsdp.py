"""FSDP2 over the mesh: what is gathered together, over which axes, in which dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from amalthea.model.transformer import Transformer
from amalthea.parallel.cut import experts_are_cut as experts_are_cut
from amalthea.parallel.mesh import Mesh


def apply_fsdp(
    model: Transformer,
    mesh: Mesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    reduce_over_replicas: bool,
    rest_on_host: bool = False,
) -> None:
    """Wraps groups of blocks, embedding, head and the root, each one unit of gathering.

    Routed experts are sharded over `efsdp`, everything else over `fsdp`. With replicas, gradients are either
    all-reduced over them here (HSDP) or left as each replica's own sum, for the optimizer to reduce to owners.
    Gradients are *summed* everywhere: the loss is divided by the global number of labels beforehand, which is right
    under any accumulation and any number of ranks. With `rest_on_host`, shards of parameters and gradients lie in host
    memory (pinned beside a GPU), and `allocate` gives the model its memory. Communication in training: an all-gather
    in forward and (resharded) one in backward, a reduce-scatter in backward, by choice an all-reduce over replicas,
    for each unit.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=None, cast_forward_inputs=False
    )

    with_replicas = reduce_over_replicas and mesh.dp_replicate > 1
    dense = _axes(mesh.dense, "fsdp", with_replicas)
    place = _expert_placement(model, mesh, with_replicas)

    resting = CPUOffloadPolicy(pin_memory=dense.device_type == "cuda") if rest_on_host else OffloadPolicy()

    def shard(module: nn.Module, *, reshard: bool) -> None:
        fully_shard(
            module,
            mesh=dense,
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=place,
            offload_policy=resting,
        )
        assert isinstance(module, FSDPModule)
        # gloo knows no pre-multiplied sum, and a sum is what is meant.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)

    *groups, last = model.groups
    for group in groups:
        shard(group, reshard=reshard_after_forward)
    # Backward begins with it: freed, it would be gathered again at once, with nothing to compute meanwhile.
    shard(last, reshard=False)
    if not model.config.tie_embeddings:
        shard(model.embed, reshard=reshard_after_forward)
        # The head's gradients come right after its forward: keep it.
        shard(model.head, reshard=False)
    shard(model, reshard=False)


def allocate(model: Transformer, device: torch.device, *, rest_on_host: bool) -> None:
    """Gives a model on the meta device memory, without values: parameters on the host by choice, buffers never."""
    model.to_empty(device="cpu" if rest_on_host else device)
    if rest_on_host:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))


def set_unshard_async_op(model: Transformer, *, enabled: bool) -> None:
    """Turns FSDP2's asynchronous unshard on, with the explicit prefetch that it needs, or back to the default.

    With it, gathers are allocated on the compute stream and their buffers are free after their own copy-out, instead of
    at the next unit's wait. FSDP2 then no longer overlaps by itself: each unit prefetches its neighbour, one ahead,
    which is as deep as one gather at a time can use.
    """
    groups = [cast(FSDPModule, group) for group in model.groups]
    units = [*groups, cast(FSDPModule, model.head)] if isinstance(model.head, FSDPModule) else groups
    if isinstance(model.embed, FSDPModule):
        units = [cast(FSDPModule, model.embed), *units]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Private in torch 2.13; there is no public name for it.
            module._set_unshard_async_op(enabled)
    for before, after in itertools.pairwise(units):
        before.set_modules_to_forward_prefetch([after] if enabled else [])
        after.set_modules_to_backward_prefetch([before] if enabled else [])


def _expert_placement(
    model: Transformer, mesh: Mesh, with_replicas: bool
) -> Callable[[nn.Parameter], Shard | ShardPlacementResult | None]:
    """Routed experts go over `efsdp` instead of `fsdp`, in the same unit as the rest of their group.

    One unit is what lets several passes, and several blocks, share one gather; experts as a unit of their own would be
    gathered by each call.
    """
    config = model.config
    sizes = (config.moe.expert_hidden_size, config.hidden_size)
    shard = Shard(int(experts_are_cut(mesh, num_experts=config.moe.num_experts, sizes=sizes)))
    experts = {id(p) for moe in model.moe_layers() for p in moe.experts.parameters()}
    placement: Shard | ShardPlacementResult = shard
    if mesh.ep > 1:
        view = _axes(mesh.experts, "efsdp", with_replicas)
        info = (
            HSDPMeshInfo(mesh=view, shard_mesh_dim=1, replicate_mesh_dim=0)
            if with_replicas
            else FSDPMeshInfo(mesh=view, shard_mesh_dim=0)
        )
        placement = ShardPlacementResult(shard, info)
    return lambda parameter: placement if id(parameter) in experts else None


def _axes(view: DeviceMesh, shard_axis: str, with_replicas: bool) -> DeviceMesh:
    """A 2-D mesh means HSDP to FSDP2, a 1-D mesh plain FSDP."""
    return view["dp_replicate", shard_axis] if with_replicas else view[shard_axis]
