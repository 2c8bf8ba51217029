"""Every coefficient set and both forms: how near they come to the exact polar factor, and what they do at the edges.

RMS is the root mean square of σ − 1 over the singular values σ of the results.

Shape legend: M matrices, R rows, C columns, S = min(R, C).
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import pytest
import torch

from amalthea.config.overrides import apply_overrides
from amalthea.core.errors import ConfigError
from amalthea.optim.newton_schulz import Coefficients, Form, orthogonalize, polynomials
from amalthea.recipes.quickstart import quickstart

Spectrum = Literal["gaussian", "flat", "1/k", "1/k²"]

SPECTRA: tuple[Spectrum, ...] = ("gaussian", "flat", "1/k", "1/k²")
SETS: tuple[Coefficients, ...] = ("quintic", "polar_express", "youj")
FORMS: tuple[Form, ...] = ("standard", "gram")
SHAPES = ((64, 256), (256, 64), (96, 160), (128, 768), (48, 100))
WORST = 1.25
"""No set takes a singular value of a normalized matrix further than this."""


@cache
def draw(spectrum: Spectrum, count: int, rows: int, columns: int) -> torch.Tensor:
    """Gaussian matrices, or Gaussian singular vectors with the given singular values; fp32 [M, R, C]."""
    generator = torch.Generator().manual_seed(rows * columns)
    matrices = torch.randn(count, rows, columns, generator=generator, dtype=torch.float64)
    if spectrum != "gaussian":
        k = torch.arange(1, min(rows, columns) + 1, dtype=torch.float64)
        u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
        matrices = u * {"flat": torch.ones_like(k), "1/k": 1 / k, "1/k²": 1 / k**2}[spectrum] @ vh
    return matrices.float()


def singular_values(matrices: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(matrices.double())


def rms(matrices: torch.Tensor) -> float:
    return float((singular_values(matrices) - 1).square().mean().sqrt())


def cosines(matrices: torch.Tensor, given: torch.Tensor) -> list[float]:
    """Of each result to the exact polar factor U·Vᵀ of what was given."""
    u, _, vh = torch.linalg.svd(given.double(), full_matrices=False)
    return torch.cosine_similarity(matrices.double().flatten(1), (u @ vh).flatten(1)).tolist()


# Accuracy


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES)
def test_gram_form_is_as_good_as_the_standard_form(
    shape: tuple[int, int], spectrum: Spectrum, coefficients: Coefficients
) -> None:
    given = draw(spectrum, 3, *shape)
    standard, gram = (orthogonalize(given, coefficients=coefficients, form=form) for form in FORMS)
    # A matrix whose singular values are all equal ends at one value, on which all rounding errors add up alike.
    assert abs(rms(gram) - rms(standard)) <= (0.03 if spectrum == "flat" else 0.01)
    assert max(singular_values(gram).max(), singular_values(standard).max()) < WORST
    assert not torch.equal(gram, standard), "two ways to compute it, not one"


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", [24, 48, 100, 160, 192])
def test_flat_spectra_end_where_the_polynomials_say(side: int, form: Form, coefficients: Coefficients) -> None:
    """Both forms, each by itself: a relative change of σ by 0.004, bf16's rounding, may move the end by ten times that.

    So on some sides the two forms differ by up to 0.05 although neither is wrong.
    """
    given = draw("flat", 1, side, 3 * side)
    rounded = given.bfloat16()
    start = float(singular_values(rounded / rounded.float().norm().bfloat16()).mean())
    got = singular_values(orthogonalize(given, coefficients=coefficients, form=form))
    assert float(got.mean()) == pytest.approx(float(follow(torch.tensor(start), coefficients)), abs=0.05)


def follow(sigma: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """Where five steps take singular values, in their own precision."""
    for a, b, c in polynomials(coefficients, 5):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(64, 256), (160, 64), (48, 48)])
@pytest.mark.parametrize("steps", [5, 6])
def test_fp32_products_are_exact_up_to_the_rounding_of_the_result(
    shape: tuple[int, int], spectrum: Spectrum, coefficients: Coefficients, form: Form, steps: int
) -> None:
    """Against the polynomials in float64, from the same bf16 matrix."""
    steps = 5 if coefficients == "youj" else steps
    given = draw(spectrum, 3, *shape).bfloat16()
    out = orthogonalize(given, coefficients=coefficients, form=form, products="fp32", num_steps=steps)
    assert out.dtype == torch.bfloat16
    norm = given.float().square().sum((-2, -1), keepdim=True).sqrt().bfloat16()
    exact = given.double() / norm.double()
    for a, b, c in polynomials(coefficients, steps):
        gram = exact @ exact.mT
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("coefficients", "least"), [("quintic", 0.98), ("polar_express", 0.99), ("youj", 0.99)])
@pytest.mark.parametrize("shape", [*SHAPES, (160, 512), (512, 160), (64, 96)])
def test_gaussians_come_near_their_polar_factor(
    shape: tuple[int, int], coefficients: Coefficients, least: float, form: Form
) -> None:
    given = draw("gaussian", 3, *shape)
    assert min(cosines(orthogonalize(given, coefficients=coefficients, form=form), given)) >= least


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("shape", [(16, 32), (32, 16), (32, 32), (100, 100)])
def test_small_and_square_gaussians_come_as_near_as_the_polynomials(
    shape: tuple[int, int], coefficients: Coefficients, form: Form
) -> None:
    """Some have a singular value too small for five steps to lift, in any precision."""
    given = draw("gaussian", 8, *shape)
    u, sigma, vh = torch.linalg.svd(given.double(), full_matrices=False)
    sigma = sigma / sigma.square().sum(dim=-1, keepdim=True).sqrt()
    exact = cosines(u * follow(sigma, coefficients)[:, None] @ vh, given)
    got = cosines(orthogonalize(given, coefficients=coefficients, form=form), given)
    assert max(e - g for e, g in zip(exact, got, strict=True)) < 0.005


@pytest.mark.parametrize(
    ("coefficients", "published", "tolerance"),
    [("quintic", 0.200, 0.02), ("polar_express", 0.086, 0.005), ("youj", 0.017, 0.003)],
)
@pytest.mark.parametrize("shape", [(160, 512), (128, 256)])
def test_published_root_mean_squares(
    shape: tuple[int, int], coefficients: Coefficients, published: float, tolerance: float
) -> None:
    """Five steps on Gaussians: Jordan (2024), arXiv 2505.16932, You Jiacheng (2024)."""
    assert rms(orthogonalize(draw("gaussian", 3, *shape), coefficients=coefficients)) == pytest.approx(
        published, abs=tolerance
    )


@pytest.mark.parametrize("form", FORMS)
def test_more_polar_express_steps_come_nearer(form: Form) -> None:
    given = draw("gaussian", 3, 64, 256)
    three, five, ten = (
        orthogonalize(given, coefficients="polar_express", num_steps=steps, form=form) for steps in (3, 5, 10)
    )
    assert rms(three) > 2 * rms(five)
    assert rms(five) > 2 * rms(ten)
    assert rms(ten) < 0.02, "what bf16 leaves"
    assert min(cosines(ten, given)) > 0.999
    assert singular_values(three).max() < 2, "not yet at rest"


def test_polar_express_steps_past_the_eighth_are_its_limit() -> None:
    steps = polynomials("polar_express", 10)
    assert steps[-1] == (1.875, -1.25, 0.375)
    safe = (1.875 / 1.01, -1.25 / 1.01**3, 0.375 / 1.01**5)
    assert steps[7] == steps[8] == safe
    assert polynomials("polar_express", 3)[:2] == steps[:2]
    assert polynomials("polar_express", 3)[2] == pytest.approx(
        [steps[2][0] * 1.01, steps[2][1] * 1.01**3, steps[2][2] * 1.01**5]
    )


# No explosion


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coefficients", SETS)
def test_no_spectrum_explodes(coefficients: Coefficients, form: Form) -> None:
    """Rank one, rank two with a gap, exponential decay over 30 decades, one row: each with 96 columns or more."""
    generator = torch.Generator().manual_seed(3)
    u, _, vh = torch.linalg.svd(torch.randn(48, 96, generator=generator, dtype=torch.float64), full_matrices=False)
    k = torch.arange(48, dtype=torch.float64)
    spectra = [(k == 0).double(), (k == 0) + 1e-6 * (k == 1), 10.0 ** (-k * 30 / 47), torch.where(k < 24, 1.0, 1e-4)]
    given = torch.stack([u * spectrum @ vh for spectrum in spectra]).float()
    out = orthogonalize(given, coefficients=coefficients, form=form)
    assert out.isfinite().all()
    assert singular_values(out).max() < WORST
    row = orthogonalize(draw("gaussian", 1, 1, 96), coefficients=coefficients, form=form)
    assert 0.6 < float(row.float().norm()) < WORST


def test_without_restarts_the_gram_form_explodes() -> None:
    """So that the tests above are known to see it."""
    given = draw("1/k", 3, 128, 768)
    assert rms(orthogonalize(given, form="gram")) < 0.3
    exploding = gram_form_without_restarts(given)
    assert not exploding.isfinite().all() or singular_values(exploding).max() > 10


def gram_form_without_restarts(given: torch.Tensor) -> torch.Tensor:
    x = given.bfloat16()
    x = x / x.float().norm(dim=(-2, -1), keepdim=True).bfloat16()
    gram = x @ x.mT
    eye = torch.eye(len(gram[0]), dtype=gram.dtype).expand_as(gram)
    collected = eye
    for a, b, c in polynomials("quintic", 5):
        factor = a * eye + b * gram + c * gram @ gram
        collected, gram = factor @ collected, factor @ gram @ factor
    return collected @ x


# Edges


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
def test_a_zero_matrix_stays_zero(shape: tuple[int, int], coefficients: Coefficients, form: Form) -> None:
    given = draw("gaussian", 3, *shape).clone()
    given[1] = 0
    out = orthogonalize(given, coefficients=coefficients, form=form)
    assert torch.equal(out[1], torch.zeros(shape, dtype=torch.bfloat16))
    assert out[0].any()
    assert out[2].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
def test_a_non_finite_matrix_poisons_itself_alone(shape: tuple[int, int], form: Form, value: float) -> None:
    given = draw("gaussian", 4, *shape)
    clean = orthogonalize(given, form=form)
    poisoned = given.clone()
    poisoned[2, 3, 5] = value
    out = orthogonalize(poisoned, form=form)
    assert out[2].isnan().any(), "it is not hidden either"
    keep = [0, 1, 3]
    assert torch.equal(out[keep], clean[keep])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(32, 80), (17, 33), (10, 32)])
def test_tall_matrices_are_the_wide_ones_transposed(shape: tuple[int, int], form: Form) -> None:
    given = draw("gaussian", 3, *shape)
    wide, tall = orthogonalize(given, form=form), orthogonalize(given.mT.contiguous(), form=form)
    assert tall.shape == (3, *shape[::-1])
    assert min(torch.cosine_similarity(tall.mT.flatten(1).double(), wide.flatten(1).double())) > 0.9995
    assert abs(rms(tall) - rms(wide)) < 0.01


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(48, 48), (32, 80), (80, 32), (9, 33), (33, 17), (3, 50)])
def test_chunks_change_no_bits(shape: tuple[int, int], form: Form) -> None:
    given = draw("gaussian", 7, *shape)
    whole = orthogonalize(given, form=form)
    for matrices in (1, 2, 3, 5):
        chunked = orthogonalize(given, form=form, max_elements=matrices * shape[0] * shape[1])
        assert torch.equal(chunked, whole), f"{matrices} at a time"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("shape", [(32, 80), (80, 32)])
def test_in_place_is_the_same(shape: tuple[int, int], steps: int, form: Form) -> None:
    given = draw("gaussian", 3, *shape).bfloat16()
    expected = orthogonalize(given, form=form, num_steps=steps)
    buffer = given.clone()
    assert orthogonalize(buffer, form=form, num_steps=steps, out=buffer) is buffer
    assert torch.equal(buffer, expected)


def test_bf16_input_is_the_fp32_input_that_was_rounded() -> None:
    given = draw("gaussian", 3, 32, 80)
    assert torch.equal(orthogonalize(given.bfloat16()), orthogonalize(given))


# Configuration


@pytest.mark.parametrize("steps", [1, 4, 6])
def test_youj_with_other_than_five_steps_is_refused_by_the_configuration(steps: int) -> None:
    with pytest.raises(ConfigError, match=f"exists for five steps only, but num_steps is {steps}"):
        apply_overrides(quickstart(), ["optim.muon.coefficients=youj", f"optim.muon.num_steps={steps}"])
    with pytest.raises(ValueError, match="youj are for 5 steps"):
        polynomials("youj", steps)


def test_youj_with_five_steps_and_other_sets_with_any_are_accepted() -> None:
    assert apply_overrides(quickstart(), ["optim.muon.coefficients=youj"]).optim.muon.num_steps == 5
    for coefficients in ("quintic", "polar_express"):
        chosen = [f"optim.muon.coefficients={coefficients}", "optim.muon.num_steps=3"]
        assert apply_overrides(quickstart(), chosen).optim.muon.num_steps == 3
