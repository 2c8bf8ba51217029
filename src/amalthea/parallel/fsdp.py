"""FSDP2 over the mesh: what is gathered together, over which axes, in which dtype."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from amalthea.model.transformer import Transformer
from amalthea.parallel.mesh import Mesh


def experts_are_cut(mesh: Mesh, *, num_experts: int, sizes: tuple[int, ...]) -> bool:
    """Whether FSDP must cut inside experts: more ranks hold a copy than it has experts, and the rows divide evenly.

    Where they do not divide, experts stay whole and ranks that get none idle. `sizes` are the rows of the stacks.
    """
    return mesh.efsdp > num_experts // mesh.ep and all(size % mesh.efsdp == 0 for size in sizes)


def apply_fsdp(
    model: Transformer,
    mesh: Mesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    reduce_over_replicas: bool,
) -> None:
    """Wraps experts, blocks, embedding, head and the root, each one unit of gathering.

    Routed experts are sharded over `efsdp`, everything else over `dp_shard`. With replicas, gradients are either
    all-reduced over them here (HSDP) or left as each replica's own sum, for the optimizer to reduce to owners.
    Gradients are *summed* everywhere: the loss is divided by the global number of labels beforehand, which is right
    under any accumulation and any number of ranks. Communication in training: an all-gather in forward and
    (resharded) one in backward, a reduce-scatter in backward, by choice an all-reduce over replicas, for each unit.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=None, cast_forward_inputs=False
    )

    def shard(module: nn.Module, axes: DeviceMesh, *, reshard: bool, dim: int = 0) -> None:
        fully_shard(
            module,
            mesh=axes,
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda _: Shard(dim),
        )
        assert isinstance(module, FSDPModule)
        # gloo knows no pre-multiplied sum, and a sum is what is meant.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)

    with_replicas = reduce_over_replicas and mesh.dp_replicate > 1
    dense, experts = _axes(mesh.dense, "dp_shard", with_replicas), _axes(mesh.experts, "efsdp", with_replicas)
    moe_config, hidden_size = model.config.moe, model.config.hidden_size
    sizes = (moe_config.expert_hidden_size, hidden_size)
    expert_dim = int(experts_are_cut(mesh, num_experts=moe_config.num_experts, sizes=sizes))
    for moe in model.moe_layers():
        shard(moe.experts, experts, reshard=reshard_after_forward, dim=expert_dim)
    for block in model.blocks:
        shard(block, dense, reshard=reshard_after_forward)
    if not model.config.tie_embeddings:
        shard(model.embed, dense, reshard=reshard_after_forward)
        # The head's gradients come right after its forward: keep it.
        shard(model.head, dense, reshard=False)
    shard(model, dense, reshard=False)


def _axes(view: DeviceMesh, shard_axis: str, with_replicas: bool) -> DeviceMesh:
    """A 2-D mesh means HSDP to FSDP2, a 1-D mesh plain FSDP."""
    return view["dp_replicate", shard_axis] if with_replicas else view[shard_axis]
