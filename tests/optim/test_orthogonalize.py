"""Newton-Schulz comes near the exact polar factor, for every matrix of a stack by itself.

Shape legend: M matrices, R rows, C columns.
"""

from __future__ import annotations

import pytest
import torch

from amalthea.optim.newton_schulz import orthogonalize

SHAPES = [(48, 48), (32, 80), (80, 32)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def polar(matrix: torch.Tensor) -> torch.Tensor:
    """U·Vᵀ of the singular value decomposition in float64."""
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ vh


def cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    left, right = left.double().flatten(), right.double().flatten()
    return float(left @ right / left.norm() / right.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gaussian_comes_near_its_polar_factor(shape: tuple[int, int]) -> None:
    stack = draw(4, *shape)
    out = orthogonalize(stack)
    assert out.dtype == torch.bfloat16
    assert out.shape == stack.shape
    for matrix, got in zip(stack, out, strict=True):
        assert cosine(got, polar(matrix)) >= 0.98
        values = torch.linalg.svdvals(got.double())
        assert values.max() < 1.3
        assert values.median() > 0.6
    flat = orthogonalize(stack.flatten(0, 1))
    assert cosine(flat, torch.cat([polar(matrix) for matrix in stack])) < 0.97, "a flattened stack is another thing"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_is_the_stack_of_one_and_its_neighbours_do_not_matter(shape: tuple[int, int]) -> None:
    stack = draw(5, *shape)
    out = orthogonalize(stack)
    louder = stack.clone()
    louder[1:] *= 1000
    torch.testing.assert_close(orthogonalize(louder)[0], out[0], rtol=0, atol=0)
    assert torch.equal(orthogonalize(stack[2])[None], orthogonalize(stack[2:3]))


@pytest.mark.parametrize("shape", SHAPES)
def test_size_of_chunks_does_not_change_bits(shape: tuple[int, int]) -> None:
    stack = draw(7, *shape)
    whole = orthogonalize(stack, max_elements=1 << 24)
    for matrices in (1, 2, 3, 6):
        elements = matrices * shape[0] * shape[1]
        assert torch.equal(orthogonalize(stack, max_elements=elements), whole), f"{matrices} at a time"
    assert torch.equal(orthogonalize(stack, max_elements=1), whole), "less than one matrix fits"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_scale_does_not_matter(shape: tuple[int, int], scale: float) -> None:
    matrix = draw(*shape)
    assert cosine(orthogonalize(scale * matrix), polar(matrix)) >= 0.98


def test_transposing_transposes() -> None:
    matrix = draw(32, 80)
    assert cosine(orthogonalize(matrix.T).T, orthogonalize(matrix)) > 0.9999


@pytest.mark.parametrize("shape", SHAPES)
def test_a_zero_matrix_stays_zero_among_others(shape: tuple[int, int]) -> None:
    stack = draw(3, *shape)
    stack[1] = 0
    out = orthogonalize(stack)
    assert not out[1].any()
    assert out[0].isfinite().all()
    assert out[2].any()


def test_no_matrices() -> None:
    assert orthogonalize(torch.empty(0, 4, 8)).shape == (0, 4, 8)


def test_the_input_is_left_as_it_was() -> None:
    for matrix in (draw(2, 8, 16), draw(2, 16, 8), draw(2, 8, 16).bfloat16()):
        before = matrix.clone()
        orthogonalize(matrix)
        assert torch.equal(matrix, before)
