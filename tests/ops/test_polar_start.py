"""polar_start against fp64: the first polynomial of a polar factor and the estimate of the norm."""

import pytest
import torch
from torch import Tensor

from drot.ops import polar_start, polar_start_ref

NUMBERS = (7.9, -21.7, 15.1, 0.95)


def powers(u: Tensor) -> tuple[Tensor, Tensor]:
    """u² and u⁴ in bf16."""
    squared = (u @ u).bfloat16()
    return squared, (squared.to(u.dtype) @ squared.to(u.dtype)).bfloat16()


def exact(
    squared: Tensor, fourth: Tensor, a: float, b: float, c: float, margin: float
) -> tuple[Tensor, Tensor]:
    """The polynomial of u in fp64, without its factor u, and the scale of u [count, 1, 1]."""
    s = margin / fourth.double().abs().sum(-1).amax(-1)[:, None, None] ** 0.25
    eye = torch.eye(squared.shape[-1], dtype=torch.float64, device=squared.device)
    return s * (a * eye - b * s**2 * squared.double() + c * s**4 * fourth.double()), s


def skew(count: int, n: int, scale: float, device: str) -> Tensor:
    u = torch.randn(count, n, n, dtype=torch.float64) * scale
    return (u - u.mT).to(device)


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("n", [2, 7, 32, 40, 130])
def test_values(n: int, scale: float, device: str) -> None:
    u = skew(3, n, scale, device)
    u[2] *= 5  # every matrix has its own norm
    squared, fourth = powers(u)
    expected, s = exact(squared, fourth, *NUMBERS)
    for p in (polar_start(squared, fourth, *NUMBERS), polar_start_ref(squared, fourth, *NUMBERS)):
        assert p.dtype == torch.bfloat16
        torch.testing.assert_close(p.double() / s, expected / s, rtol=2**-8, atol=1e-5)


def test_the_product_with_u_is_the_polynomial_of_the_singular_values(device: str) -> None:
    """By an SVD in fp64: u p has u's singular vectors, and the singular values σ (a + b σ² + c σ⁴) of x."""
    u = skew(1, 24, 1.0, device)
    squared = u @ u
    a, b, c, margin = NUMBERS
    left, values, right = torch.linalg.svd(u)
    p = polar_start(squared.bfloat16(), (squared @ squared).bfloat16(), *NUMBERS).double()
    x = values * margin / (squared @ squared).abs().sum(-1).amax() ** 0.25
    assert float(x.amax()) <= margin * 1.001
    wanted = (left * (a * x + b * x**3 + c * x**5)[:, None, :]) @ right
    assert float((u @ p - wanted).norm() / wanted.norm()) < 2**-6


def test_nothing_and_zeros(device: str) -> None:
    for shape in ((0, 4, 4), (2, 0, 0)):
        empty = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        assert polar_start(empty, empty, *NUMBERS).shape == shape
    zero = torch.zeros(2, 9, 9, device=device, dtype=torch.bfloat16)
    p = polar_start(zero, zero, *NUMBERS)
    assert p.isfinite().all() and torch.equal(zero @ p, zero)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad: float, device: str) -> None:
    squared, fourth = powers(skew(2, 16, 1.0, device))
    fourth[0, 3, 4] = bad
    p = polar_start(squared, fourth, *NUMBERS)
    assert p[0].isnan().any() and p[1].isfinite().all()


def test_matrices_that_are_not_contiguous(device: str) -> None:
    squared, fourth = powers(torch.randn(2, 12, 12, dtype=torch.float64).to(device))
    expected = polar_start(squared.mT.contiguous(), fourth.mT.contiguous(), *NUMBERS)
    assert torch.equal(polar_start(squared.mT, fourth.mT, *NUMBERS), expected)
    store = torch.zeros(2 * 12 * 12 + 1, device=device, dtype=torch.bfloat16)
    shifted = store[1:].view(2, 12, 12).copy_(squared)
    assert torch.equal(polar_start(shifted, fourth, *NUMBERS), polar_start(squared, fourth, *NUMBERS))


@pytest.mark.parametrize(
    ("squared", "fourth", "numbers", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 2), NUMBERS, r"squared must be \[count, n, n\], got \[2, 2\]"),
        (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), NUMBERS, r"squared must be \[..., n, n\]"),
        (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), NUMBERS, "squared must be one of BFloat16, got Float"),
        (torch.zeros(1, 2, 2).bfloat16(), torch.zeros(2, 2, 2).bfloat16(), NUMBERS, "the shape of squared"),
        (torch.zeros(1, 2, 2).bfloat16(), torch.zeros(1, 2, 2), NUMBERS, "fourth must have the dtype"),
        (
            torch.zeros(1, 2, 2).bfloat16(),
            torch.zeros(1, 2, 2).bfloat16(),
            (1.0, float("inf"), 1.0, 1.0),
            "a, b and c must be finite, got 1, inf and 1",
        ),
        (
            torch.zeros(1, 2, 2).bfloat16(),
            torch.zeros(1, 2, 2).bfloat16(),
            (1.0, 1.0, 1.0, 0.0),
            "margin must be above 0 and finite, got 0",
        ),
    ],
)  # fmt: skip
def test_wrong_input(squared: Tensor, fourth: Tensor, numbers: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        polar_start(squared, fourth, *numbers)


@pytest.mark.slow
def test_torch_accepts_the_op_and_compiles_it(device: str) -> None:
    squared, fourth = powers(skew(2, 33, 1.0, device))
    torch.library.opcheck(torch.ops.drot.polar_start.default, (squared, fourth, *NUMBERS))
    compiled = torch.compile(
        lambda s, f: 2 * polar_start(s, f, *NUMBERS), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(squared, fourth), 2 * polar_start(squared, fourth, *NUMBERS))
