"""The formula for kept activations against tracked storages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import small_model_config

from amalthea.kernels.attention import Documents
from amalthea.memory.config import MemoryConfig
from amalthea.memory.copies import DirectCopies
from amalthea.memory.estimate import kept_activations
from amalthea.memory.offload import apply_offload, plan_offload
from amalthea.memory.recompute import apply_recompute
from amalthea.memory.tracker import StorageTracker
from amalthea.model.blocks import BlockGroup
from amalthea.model.config import ModelConfig
from amalthea.model.init import initialize
from amalthea.model.transformer import Transformer

SEQ_LEN, SEQUENCES = 128, 2
MODELS = {
    "moe": {"num_kv_heads": 1},
    "dense first, no qk-norm": {"num_kv_heads": 2, "qk_norm": False, "num_dense_layers": 2, "dense_hidden_size": 48},
    "no shared expert, top 3": {"moe__num_shared_experts": 0, "moe__top_k": 3, "moe__normalize_weights": False},
}
LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "block": {"recompute": "block"},
    "every 2": {"recompute": "block", "blocks_per_group": 2},
    "every 4, the last short": {"recompute": "block", "blocks_per_group": 4},
    "selective": {"recompute": "selective"},
    "selective, experts": {"recompute": "selective", "keep": ("experts", "attention")},
    "offload": {"recompute": "block", "offload": True},
    "2 passes": {"sequences_per_gather": 2},
    "2 passes, offload": {"sequences_per_gather": 2, "recompute": "block", "offload": True},
}


def tracked_bytes(config: ModelConfig, memory: MemoryConfig) -> int:
    """What a forward pass leaves alive, host arena included."""
    model = Transformer(config, blocks_per_group=memory.blocks_per_group)
    initialize(model, seed=0)
    for group in model.groups:
        assert isinstance(group, BlockGroup)
        group.sequences_per_pass = SEQUENCES
    if memory.recompute != "none":
        apply_recompute(model, keep=memory.keep if memory.recompute == "selective" else ())
    if memory.offload:
        plan = plan_offload(
            num_groups=len(model.groups),
            num_passes=memory.sequences_per_gather,
            boundary_bytes=SEQUENCES * SEQ_LEN * config.hidden_size * 4,
            budget_gib=None,
            host_available_bytes=1 << 30,
        )
        apply_offload(model, plan, dtype=torch.float32, copies=DirectCopies())
    batch = SEQUENCES * memory.sequences_per_gather
    tokens = torch.zeros(batch, SEQ_LEN, dtype=torch.int64)
    documents = Documents.whole(batch, SEQ_LEN)
    with StorageTracker() as tracker:
        for tensor in [*model.parameters(), *model.buffers(), tokens]:
            tracker.add(tensor)
        before = tracker.live_bytes
        output = model(tokens, documents, tokens)
        kept = tracker.live_bytes - before
    assert output.result.requires_grad
    return kept


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("shape", MODELS)
def test_within_one_percent_of_tracked_storages(shape: str, lever: str) -> None:
    config = small_model_config(num_layers=6, max_seq_len=SEQ_LEN, **MODELS[shape])
    memory = MemoryConfig(**LEVERS[lever])
    estimate = kept_activations(config, memory, pass_tokens=SEQUENCES * SEQ_LEN)
    assert estimate.device_bytes + estimate.host_bytes == pytest.approx(tracked_bytes(config, memory), rel=0.01)
