"""Building: nothing is allocated on meta, RoPE has one pair of buffers, ties hold, parameters have their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import small_batch, small_model, small_model_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amalthea.model.attention import Rope
from amalthea.model.config import MoEConfig
from amalthea.model.transformer import Transformer
from amalthea.recipes.europa_1t import europa_1t


class Allocations(TorchDispatchMode):
    """Notes the bytes of every tensor that an operation made off the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.num_bytes += tensor.untyped_storage().nbytes()
        return result


def test_a_trillion_parameters_are_built_on_meta_without_a_byte() -> None:
    with Allocations() as allocations, torch.device("meta"):
        model = Transformer(europa_1t().model)
    assert allocations.num_bytes == 0
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(951.9e9, rel=1e-4)
    with Allocations() as allocations:
        Transformer(small_model_config())
    assert allocations.num_bytes > 0, "the detector sees allocations where they are"


def rope_storages(model: Transformer) -> set[int]:
    """Storages of all cosines and sines that any module holds, as buffers or otherwise."""
    found = [buffer for name, buffer in model.named_buffers() if not name.endswith("router.bias")]
    for module in model.modules():
        found += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    assert all(tensor.shape == model.rope.cos.shape for tensor in found)
    return {tensor.untyped_storage().data_ptr() for tensor in found}


def test_all_layers_share_one_pair_of_rope_buffers() -> None:
    config = small_model_config(num_layers=5)
    expected = {}
    for made in ("directly", "on meta"):
        model = Transformer(config) if made == "directly" else small_model(config)
        pair = {tensor.untyped_storage().data_ptr() for tensor in (model.rope.cos, model.rope.sin)}
        assert rope_storages(model) == pair
        assert len(pair) == 2
        expected[made] = (model.rope.cos, model.rope.sin)
    assert all(torch.equal(a, b) for a, b in zip(*expected.values(), strict=True))


def test_rope_is_reset_in_place() -> None:
    model = small_model()
    before, cosines = model.rope.cos.data_ptr(), model.rope.cos.clone()
    model.rope.cos.zero_()
    model.rope.reset()
    assert model.rope.cos.data_ptr() == before
    assert torch.equal(model.rope.cos, cosines)


def test_rope_of_65_536_positions_takes_34_megabytes() -> None:
    config = small_model_config(max_seq_len=65_536, head_dim=128)
    with torch.device("meta"):
        model = Transformer(config)
    buffers = [buffer for name, buffer in model.named_buffers() if name.startswith("rope.")]
    assert {buffer.dtype for buffer in buffers} == {torch.float32}
    assert sum(buffer.nbytes for buffer in buffers) == 2 * 65_536 * 64 * 4 == 33_554_432
    assert not any("rope" in name for name in model.state_dict()), "it is not saved"


def test_rope_equals_its_definition() -> None:
    rope = Rope(small_model_config(rope_theta=50.0, head_dim=8, max_seq_len=11))
    positions, pairs = torch.arange(11, dtype=torch.float64), torch.arange(4, dtype=torch.float64)
    angles = positions[:, None] * 50.0 ** (-2 * pairs / 8)
    torch.testing.assert_close(rope.cos.double(), angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(rope.sin.double(), angles.sin(), rtol=0, atol=1e-6)


def test_parameters_have_their_names_and_shapes() -> None:
    config = small_model_config(
        num_dense_layers=1, dense_hidden_size=12, moe__num_shared_experts=2, num_heads=4, num_kv_heads=2
    )
    with torch.device("meta"):
        model = Transformer(config)
    attention = {
        "attn_norm.weight": (16,),
        "attn.wq.weight": (32, 16),
        "attn.wk.weight": (16, 16),
        "attn.wv.weight": (16, 16),
        "attn.wo.weight": (16, 32),
        "attn.q_norm.weight": (8,),
        "attn.k_norm.weight": (8,),
        "ffn_norm.weight": (16,),
    }
    dense = {"mlp.w_gate.weight": (12, 16), "mlp.w_up.weight": (12, 16), "mlp.w_down.weight": (16, 12)}
    moe = {
        "moe.router.weight": (8, 16),
        "moe.experts.w_gate": (8, 8, 16),
        "moe.experts.w_up": (8, 8, 16),
        "moe.experts.w_down": (8, 16, 8),
        "moe.shared.w_gate.weight": (16, 16),
        "moe.shared.w_up.weight": (16, 16),
        "moe.shared.w_down.weight": (16, 16),
    }
    expected = {"embed.weight": (50, 16), "norm.weight": (16,), "head.weight": (50, 16)}
    expected |= {f"blocks.0.{name}": shape for name, shape in (attention | dense).items()}
    expected |= {f"blocks.1.{name}": shape for name, shape in (attention | moe).items()}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == expected
    saved_buffers = set(model.state_dict()) - set(expected)
    assert saved_buffers == {"blocks.1.moe.router.bias"}
    assert model.moe_layers()[0].router.bias.dtype == torch.float32


def test_no_shared_experts_and_no_qk_norm() -> None:
    config = small_model_config(moe__num_shared_experts=0, qk_norm=False)
    model = small_model(config)
    assert not [name for name, _ in model.named_parameters() if "shared" in name or "q_norm" in name]
    tokens, documents, labels = small_batch(config)
    assert model(tokens, documents, labels).result.isfinite()


def test_dense_layers_count_nothing() -> None:
    config = small_model_config(num_layers=3, num_dense_layers=2, dense_hidden_size=12, moe__z_loss_coef=0.1)
    model = small_model(config)
    tokens, documents, labels = small_batch(config)
    output = model(tokens, documents, labels)
    assert output.counts.shape == (1, 8)
    assert [moe is model.blocks[2].moe for moe in model.moe_layers()] == [True]
    all_dense = small_model(small_model_config(num_dense_layers=2, dense_hidden_size=12))
    output = all_dense(tokens, documents, labels)
    assert output.counts.shape == (0, 8)
    assert not output.router_losses.any()
    assert all_dense.moe_layers() == []


def test_tied_embeddings_are_one_parameter_after_to_empty_too() -> None:
    config = small_model_config(tie_embeddings=True)
    model = small_model(config)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    tokens, documents, labels = small_batch(config)
    loss = model(tokens, documents, labels).result
    loss.backward()
    tied_grad = model.embed.weight.grad
    assert tied_grad is not None

    apart = small_model(small_model_config())
    apart.load_state_dict(model.state_dict())
    apart_loss = apart(tokens, documents, labels).result
    assert torch.equal(loss, apart_loss)
    apart_loss.backward()
    separate = [apart.embed.weight.grad, apart.head.weight.grad]
    assert separate[0] is not None
    assert separate[1] is not None
    torch.testing.assert_close(tied_grad, separate[0] + separate[1], rtol=1e-5, atol=1e-6)
    assert model.to(torch.float64).head.weight is model.embed.weight


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_kv_heads", 3, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ("head_dim", 7, "head_dim is 7; RoPE turns pairs, so it must be even"),
        ("num_dense_layers", 3, "num_dense_layers 3 exceeds num_layers 2"),
        ("num_dense_layers", 1, "give the dense layers a width"),
    ],
)
def test_contradictions_are_refused(field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_model_config(num_heads=4, **{field: value})


def test_every_contradiction_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_kv_heads 3; head_dim is 7"):
        small_model_config(num_heads=4, num_kv_heads=3, head_dim=7)
    with pytest.raises(ValueError, match="top_k is 9, more than num_experts 8; lower top_k"):
        MoEConfig(num_experts=8, top_k=9, expert_hidden_size=4)
