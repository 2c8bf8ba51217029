"""FSDP2 over the mesh: what is gathered together, over which axes, in which dtype."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from amalthea.model.transformer import Transformer
from amalthea.parallel.mesh import Mesh


def apply_fsdp(
    model: Transformer, mesh: Mesh, *, param_dtype: torch.dtype, reduce_dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """Wraps experts, blocks, embedding, head and the root, each one unit of gathering.

    Routed experts are sharded over `efsdp`, everything else over `dp_shard`; with replicas both are HSDP. Gradients
    are *summed* everywhere: the loss is divided by the global number of labels beforehand, which is right under any
    accumulation and any number of ranks. Communication in training: an all-gather in forward and (resharded) one in
    backward, a reduce-scatter in backward, an all-reduce over replicas, for each unit.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=None, cast_forward_inputs=False
    )

    def shard(module: nn.Module, axes: DeviceMesh, *, reshard: bool) -> None:
        fully_shard(module, mesh=axes, mp_policy=policy, reshard_after_forward=reshard)
        assert isinstance(module, FSDPModule)
        # gloo knows no pre-multiplied sum, and a sum is what is meant.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)

    dense, experts = _axes(mesh.dense, "dp_shard"), _axes(mesh.experts, "efsdp")
    for moe in model.moe_layers():
        shard(moe.experts, experts, reshard=reshard_after_forward)
    for block in model.blocks:
        shard(block, dense, reshard=reshard_after_forward)
    if not model.config.tie_embeddings:
        shard(model.embed, dense, reshard=reshard_after_forward)
        # The head's gradients come right after its forward: keep it.
        shard(model.head, dense, reshard=False)
    shard(model, dense, reshard=False)


def _axes(view: DeviceMesh, shard_axis: str) -> DeviceMesh:
    """A 2-D mesh means HSDP to FSDP2; a single replica is plain FSDP."""
    return view[("dp_replicate", shard_axis)] if view["dp_replicate"].size() > 1 else view[shard_axis]
