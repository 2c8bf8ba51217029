"""Initial weights: the right spread for each kind, and the same bits however a parameter is cut."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import small_model, small_model_config
from torch import nn

from amalthea.model import init
from amalthea.model.init import initialize, parameter_seed, parameter_std
from amalthea.model.transformer import Transformer

DENSE: dict[str, Any] = {"num_layers": 3, "num_dense_layers": 1, "dense_hidden_size": 12}


def parameters(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def in_pieces(model: Transformer, ends: list[float], *, dim: int = 0, seed: int) -> dict[str, torch.Tensor]:
    """Every parameter drawn in pieces along a dimension, cut at fractions of it, and joined again."""
    joined: dict[str, list[torch.Tensor]] = {}
    for first, last in pairwise([0.0, *sorted(ends), 1.0]):

        def part_of(
            name: str, parameter: nn.Parameter, first: float = first, last: float = last
        ) -> tuple[torch.Tensor, tuple[int, ...]]:
            axis = min(dim, parameter.ndim - 1)
            begin, end = (round(fraction * parameter.shape[axis]) for fraction in (first, last))
            local = torch.full_like(parameter.data.narrow(axis, begin, end - begin), math.nan)
            joined.setdefault(name, []).append(local)
            return local, tuple(begin if i == axis else 0 for i in range(parameter.ndim))

        initialize(model, seed=seed, part_of=part_of)
    return {name: torch.cat(pieces, dim=min(dim, pieces[0].ndim - 1)) for name, pieces in joined.items()}


STDS = {
    "embed.weight": 1.0,
    "head.weight": 0.2,
    "wq.weight": 0.2,
    "wk.weight": 0.2,
    "wv.weight": 0.2,
    "wo.weight": 0.2 / math.sqrt(6),
    "router.weight": 0.2,
    "w_gate": 0.2,
    "w_up": 0.2,
    "w_down": 0.2 / math.sqrt(6),
    "w_gate.weight": 0.2,
    "w_up.weight": 0.2,
    "w_down.weight": 0.2 / math.sqrt(6),
}


def test_deviation_by_kind() -> None:
    config = small_model_config(**DENSE)
    with torch.device("meta"):
        names = [name for name, _ in Transformer(config).named_parameters()]
    for name in names:
        found = [std for ending, std in STDS.items() if name.endswith(ending)]
        assert parameter_std(name, config) == (found[-1] if found else None), name
        assert bool(found) != ("norm" in name), name
    tied = small_model_config(tie_embeddings=True)
    assert parameter_std("embed.weight", tied) == 0.2, "the embedding is the head too"


def test_values_have_the_deviation_and_norms_are_one() -> None:
    config = small_model_config(hidden_size=64, vocab_size=500, **DENSE)
    model = small_model(config)
    for name, values in parameters(model).items():
        std = parameter_std(name, config)
        if std is None:
            assert torch.equal(values, torch.ones_like(values)), name
            continue
        slack = 6 / math.sqrt(2 * values.numel())
        assert values.std().item() == pytest.approx(std, rel=slack), name
        assert abs(values.mean().item()) < 6 * std / math.sqrt(values.numel()), name
        assert len(values.unique()) > 0.99 * values.numel(), f"{name}: rows or bands repeat"


def test_load_balance_biases_start_at_zero_and_rope_is_filled() -> None:
    model = small_model()
    for moe in model.moe_layers():
        moe.router.bias.fill_(3.0)
    model.rope.sin.fill_(7.0)
    initialize(model, seed=0)
    assert not any(moe.router.bias.any() for moe in model.moe_layers())
    assert torch.equal(model.rope.sin, small_model().rope.sin)


def test_the_seed_and_the_name_decide_alone() -> None:
    first = parameters(small_model(seed=3))
    torch.manual_seed(99)
    model = small_model(seed=4)
    for name, values in parameters(model).items():
        assert torch.equal(values, first[name]) == ("norm" in name), f"{name} must differ between seeds"
    backwards = list(reversed(list(model.named_parameters())))
    model.named_parameters = lambda: iter(backwards)  # type: ignore[method-assign]
    initialize(model, seed=3)
    del model.named_parameters
    for name, values in parameters(model).items():
        assert torch.equal(values, first[name]), f"{name} depends on the order"


def test_parameters_of_one_shape_differ_by_name() -> None:
    values = parameters(small_model())
    matrices = [name for name, tensor in values.items() if "norm" not in name]
    drawn = {tuple((values[name] / values[name].std()).flatten()[:4].tolist()) for name in matrices}
    assert len(drawn) == len(matrices)
    assert len({parameter_seed(seed, name) for seed in (0, 1) for name in values}) == 2 * len(values)
    assert all(0 <= parameter_seed(0, name) < 1 << 63 for name in values)


def test_drawing_leaves_the_global_generator_alone() -> None:
    model = small_model()
    before = torch.get_rng_state()
    initialize(model, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@given(
    ends=st.lists(st.floats(0, 1), max_size=5),
    dim=st.integers(0, 2),
    band_elements=st.sampled_from([1, 40, 130, 1 << 20]),
)
@settings(max_examples=12, deadline=None)
def test_bits_do_not_depend_on_the_split(ends: list[float], dim: int, band_elements: int) -> None:
    """Rows, columns of a matrix, rows inside the experts of a stack."""
    model = small_model(small_model_config(num_layers=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "_BAND_ELEMENTS", band_elements)
        initialize(model, seed=11)
        whole = parameters(model)
        pieces = in_pieces(model, ends, dim=dim, seed=11)
    assert pieces.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(whole[name], pieces[name])] == []


def test_a_parameter_larger_than_a_band() -> None:
    """The embedding spans two bands of the real height, cut inside each."""
    rows, columns = 20_000, 64
    config = small_model_config(num_layers=1, vocab_size=rows, hidden_size=columns, tie_embeddings=True)
    assert init._BAND_ELEMENTS < rows * columns < 2 * init._BAND_ELEMENTS
    model = small_model(config, seed=2)
    band_rows = init._BAND_ELEMENTS // columns
    weight = model.embed.weight
    assert not torch.equal(weight[:100], weight[band_rows : band_rows + 100])
    for dim in (0, 1):
        assert torch.equal(in_pieces(model, [0.3, 0.9], dim=dim, seed=2)["embed.weight"], weight)
