"""A spectral step turns every direction by the same angle, and its result is orthogonal."""

import math

import pytest
import torch

from drot.model.rotation import orthogonality_error
from drot.rotation.optimizers import FastOptimizer
from drot.rotation.retraction import STEPS, polar_of_skew, turn

SHAPES = [(1, 1), (2, 2), (7, 7), (3, 32, 32), (2, 2, 16, 16), (130, 130)]


def orthogonal(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].to(device, dtype).contiguous()


def skew(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    a = torch.randn(*shape, dtype=torch.float64)
    return (a - a.mT).to(device, dtype)


def with_spectrum(sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A skew-symmetric [2k, 2k] with the singular values sigma [k], twice each, and its polar factor."""
    block = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    v = orthogonal((2 * len(sigma), 2 * len(sigma)), torch.float64, "cpu")
    unit = torch.block_diag(*[block] * len(sigma))
    return v @ torch.block_diag(*[s * block for s in sigma]) @ v.T, v @ unit @ v.T


def test_the_polynomials_bring_their_range_near_to_one() -> None:
    x = torch.linspace(0.01, 1, 100_000, dtype=torch.float64)
    for a, b, c in STEPS:
        x = a * x + b * x**3 + c * x**5
    assert 0.82 < float(x.min()) < float(x.max()) < 1.18


@pytest.mark.parametrize("n", [2, 16, 256])
def test_polar_factor_of_a_known_spectrum(n: int, device: str) -> None:
    u, expected = with_spectrum(torch.logspace(-1.3, 0, n // 2, dtype=torch.float64))
    j = polar_of_skew(u.float().to(device)).double().cpu()
    assert torch.linalg.matrix_norm(j - expected, 2) < 0.03
    assert torch.linalg.matrix_norm(j + j.T, 2) < 1e-4


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_polar_factor_does_not_depend_on_the_scale(scale: float, device: str) -> None:
    u = skew((3, 24, 24), torch.float32, device)
    torch.testing.assert_close(polar_of_skew(u * scale), polar_of_skew(u), rtol=0, atol=1e-4)


def test_polar_factor_of_nothing(device: str) -> None:
    zero = torch.zeros(2, 5, 5, device=device)
    assert torch.equal(polar_of_skew(zero), zero)
    odd = skew((7, 7), torch.float64, device)  # an odd skew-symmetric matrix is singular
    assert float(torch.linalg.svdvals(polar_of_skew(odd)).min()) < 1e-6


@pytest.mark.parametrize("angle", [0.0, 1e-3, 0.3, 1.5])
def test_turn_is_the_exponential(angle: float, device: str) -> None:
    _, j = with_spectrum(torch.ones(10, dtype=torch.float64))
    q, j = orthogonal((20, 20), torch.float64, device), j.to(device)
    expected = q @ torch.matrix_exp(-angle * j)
    torch.testing.assert_close(turn(q, j, angle), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_turn_stays_orthogonal(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """With the polar factor as it is computed, whose singular values are near 1, or 0."""
    q = orthogonal(shape, dtype, device)
    moved = turn(q, polar_of_skew(skew(shape, dtype, device)), 0.3)
    assert orthogonality_error(moved) < 1e-5
    assert torch.allclose(torch.linalg.det(moved.double()), torch.linalg.det(q.double()), atol=1e-3)


@pytest.mark.parametrize("n", [2, 32, 256])
def test_the_angle_does_not_depend_on_the_width(n: int, device: str) -> None:
    """‖Q' - Q‖₂ = 2 sin(θ/2) for the first step, whatever n and the scale of the gradient are."""
    for scale in (1e-6, 1.0, 1e6):
        optimizer = FastOptimizer([torch.eye(n, device=device)[None]], lr=0.3, steps=10, objective="pruned")
        optimizer.step([scale * torch.randn(1, n, n, device=device)])
        change = torch.linalg.matrix_norm(optimizer.matrices[0].double() - torch.eye(n, device=device), 2)
        # a GPU takes the step in bf16, from polynomials that leave the singular values in 0.82 … 1.18
        assert float(change) == pytest.approx(2 * math.sin(0.15), rel=0.01 if device == "cpu" else 0.2)


def test_many_steps_do_not_drift(device: str) -> None:
    q = torch.eye(64, device=device)
    for _ in range(200):
        q = turn(q, polar_of_skew(skew((64, 64), torch.float32, device)), 0.3)
    assert orthogonality_error(q) < 1e-5
