"""Attention equals a loop over queries in float64, and a document never sees another one.

Shape legend: B sequences, S tokens per sequence, H query heads, G key/value heads, d head dim.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amalthea.kernels.attention import Documents, attention, attention_by_document

HEADS, KV_HEADS, HEAD_DIM, SEQ_LEN = 4, 2, 6, 14
PACKED = ((5, 1, 8), (3, 11))
PATHS = ["whole", "masked", "each", "twin"]


def inputs(batch: int, seq_len: int, *, kv_heads: int = KV_HEADS, seed: int = 0) -> list[torch.Tensor]:
    """Query, key and value in float64, normal with deviation 1.5 so that the softmax is uneven."""
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, kv_heads, kv_heads)
    shapes = [(batch, seq_len, count, HEAD_DIM) for count in heads]
    return [1.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def reference(tensors: list[torch.Tensor], lengths: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """One query and one head at a time, over the keys of its document up to itself."""
    query, key, value = tensors
    group = query.shape[2] // key.shape[2]
    rows = []
    for b, row_lengths in enumerate(lengths):
        begin = 0
        for length in row_lengths:
            for s in range(begin, begin + length):
                for h in range(query.shape[2]):
                    keys, values = key[b, begin : s + 1, h // group], value[b, begin : s + 1, h // group]
                    weights = (keys @ query[b, s, h] / math.sqrt(query.shape[3])).exp()
                    rows.append(weights @ values / weights.sum())
            begin += length
    return torch.stack(rows).view(query.shape)


def run(path: str, tensors: list[torch.Tensor], documents: Documents) -> torch.Tensor:
    """`attention` on a path of choice."""
    if path == "twin":
        return attention_by_document(*tensors, documents=documents)
    documents.__dict__["prefer_mask"] = path == "masked"  # takes the place of the cached property
    return attention(*tensors, documents=documents)


def with_gradients(function, tensors: list[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients by query, key and value."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_output_and_gradients_equal_a_loop(path: str, kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    lengths = ((SEQ_LEN,), (SEQ_LEN,)) if path == "whole" else PACKED
    tensors = inputs(2, SEQ_LEN, kv_heads=kv_heads)
    upstream = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = with_gradients(lambda t: reference(t, lengths), tensors, upstream)
    documents = Documents.of(lengths, SEQ_LEN)
    got = with_gradients(lambda t: run(path, t, documents), [t.to(dtype) for t in tensors], upstream)
    for name, left, right in zip(("out", "query", "key", "value"), got, expected, strict=True):
        assert left.dtype == dtype
        torch.testing.assert_close(
            left.double(), right, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("path", PATHS)
def test_bf16_is_as_good_as_its_rounding(path: str) -> None:
    lengths = ((SEQ_LEN,), (SEQ_LEN,)) if path == "whole" else PACKED
    tensors = [tensor.bfloat16() for tensor in inputs(2, SEQ_LEN)]
    out = run(path, tensors, Documents.of(lengths, SEQ_LEN))
    assert out.dtype == torch.bfloat16
    exact = reference([tensor.double() for tensor in tensors], lengths)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("path", ["masked", "each", "twin"])
def test_a_document_sees_nothing_of_another_bit_for_bit(path: str) -> None:
    documents = Documents.of(PACKED, SEQ_LEN)
    tensors = [tensor.float() for tensor in inputs(2, SEQ_LEN)]
    upstream = torch.ones_like(tensors[0])
    before = with_gradients(lambda t: run(path, t, documents), tensors, upstream)
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed:
        tensor[0, 2] += 3.0  # in the first document of sequence 0, which ends at 5
    after = with_gradients(lambda t: run(path, t, documents), changed, upstream)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[0, 5:], new[0, 5:])
        assert torch.equal(old[1], new[1])
        assert not torch.equal(old[0, :5], new[0, :5])


@pytest.mark.parametrize("path", PATHS)
def test_a_later_token_changes_nothing_before_it(path: str) -> None:
    documents = Documents.of(((SEQ_LEN,),) if path == "whole" else PACKED[:1], SEQ_LEN)
    tensors = [tensor.float() for tensor in inputs(1, SEQ_LEN)]
    before = run(path, tensors, documents)
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed:
        tensor[0, 10] -= 2.0
    after = run(path, changed, documents)
    assert torch.equal(before[0, :10], after[0, :10])
    assert (before[0, 10:] != after[0, 10:]).flatten(1).any(1).all()


@given(cuts=st.sets(st.integers(1, 20)), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_every_packing_is_the_same_on_every_path(cuts: set[int], seed: int) -> None:
    edges = [0, *sorted(cuts), 21]
    lengths = (tuple(b - a for a, b in pairwise(edges)), (21,))
    tensors = inputs(2, 21, seed=seed)
    twin = run("twin", tensors, Documents.of(lengths, 21))
    torch.testing.assert_close(run("masked", tensors, Documents.of(lengths, 21)), twin, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(run("each", tensors, Documents.of(lengths, 21)), twin, rtol=1e-12, atol=1e-12)


def test_prefer_mask_takes_what_costs_less() -> None:
    assert Documents.of(((2,) * 64,), 128).prefer_mask, "many short documents: one product"
    assert not Documents.of(((1024, 1024),), 2048).prefer_mask, "few long documents: half of each square is spared"


def test_documents_say_where_they_lie() -> None:
    documents = Documents.of(((3, 1), (4,)), 4)
    assert documents.flat_lengths == [3, 1, 4]
    assert documents.offsets.tolist() == [0, 3, 4, 8]
    assert documents.offsets.dtype == torch.int32
    assert documents.max_length == 4
    assert not documents.are_whole
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    expected = causal.clone()
    expected[3, :3] = False
    assert torch.equal(documents.mask, torch.stack((expected, causal))[:, None])
    assert Documents.whole(2, 4) == Documents.of(((4,), (4,)), 4)
    assert Documents.whole(2, 4).are_whole


def test_documents_split_by_sequences_and_keep_the_parts() -> None:
    documents = Documents.of(((3, 1), (4,), (2, 2)), 4)
    parts = documents.split(2)
    assert [part.lengths for part in parts] == [((3, 1), (4,)), ((2, 2),)]
    assert torch.equal(torch.cat([part.mask for part in parts]), documents.mask)
    again = documents.split(2)
    assert all(part is same for part, same in zip(parts, again, strict=True)), "layers share masks"


@pytest.mark.parametrize("lengths", [(3, 2), (4, 1, -1), (4, 0), ()], ids=["sum", "negative", "zero", "none"])
def test_lengths_that_do_not_fill_a_sequence_are_refused_by_row(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"sequence 1 are .* must be positive and sum to seq_len 4"):
        Documents.of(((4,), lengths), 4)
