"""The step in bf16 against the step in fp64, and what it keeps. On a CPU its products are emulated."""

import pytest
import torch
from test_retraction import orthogonal, skew, with_spectrum

from drot.machine.products import identity_plus_product
from drot.model.rotation import orthogonality_error, reorthogonalize
from drot.rotation.retraction import DIRECTIONS, SpectralStep
from drot.rotation.tensor_cores import TensorCoreStep, angles, polar_factor, turn

SHAPES = [(1, 2, 2), (1, 7, 7), (3, 32, 32), (1, 130, 130)]
THETA = 0.3
#: what rounding to bf16 may leave of an element of qᵀq - 1
ROUNDING = 1e-2


def step(q: torch.Tensor, gradient: torch.Tensor, theta: float = THETA) -> torch.Tensor:
    moved = q.clone()
    TensorCoreStep(q, DIRECTIONS["pruned"])(moved, gradient, angles([theta], q.device)[0])
    return moved


@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_an_identity(shape: tuple[int, ...], device: str) -> None:
    a, b = torch.randn(2, *shape).bfloat16().to(device)
    eye = torch.eye(shape[-1], device=device, dtype=torch.float64)
    expected = 1.5 * eye - 0.5 * (a.double() @ b.double())
    found = identity_plus_product(1.5, a, b, alpha=-0.5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("n", [2, 16, 256])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_polar_factor_of_a_known_spectrum(n: int, scale: float, device: str) -> None:
    u, expected = with_spectrum(torch.logspace(-1, 0, n // 2, dtype=torch.float64))
    rounded = (scale * u)[None].bfloat16().to(device)
    j = polar_factor(rounded)[0].double().cpu()
    assert torch.linalg.matrix_norm(j - expected, 2) < 0.25


def test_polar_factor_of_nothing(device: str) -> None:
    zero = torch.zeros(2, 5, 5, device=device, dtype=torch.bfloat16)
    assert torch.equal(polar_factor(zero), zero)
    q = orthogonal((2, 5, 5), torch.float32, device)
    assert (step(q, torch.zeros_like(q)) - q).abs().max() < ROUNDING


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_is_the_step_in_fp64_and_loses_no_orthogonality(
    shape: tuple[int, ...], scale: float, device: str
) -> None:
    q, gradient = orthogonal(shape, torch.float32, device), skew(shape, torch.float64, device)
    moved = step(q, (scale * gradient).float())
    # an odd u is 0 in a direction, where the polynomials multiply rounding
    rounding = 5 * ROUNDING if shape[-1] % 2 else ROUNDING
    assert moved.dtype == torch.float32 and orthogonality_error(moved) < rounding
    assert orthogonality_error(reorthogonalize(moved)) < 1e-14
    exact = q.double()
    SpectralStep(exact, DIRECTIONS["pruned"])(exact, gradient, THETA)
    assert (moved - exact).norm() <= 0.25 * (exact - q).norm() + rounding


@pytest.mark.parametrize("theta", [0.0, 1e-3, 1.5])
def test_turn_is_the_exponential(theta: float, device: str) -> None:
    _, j = with_spectrum(torch.ones(10, dtype=torch.float64))
    q = orthogonal((1, 20, 20), torch.float32, device)
    turned = turn(q.clone(), q.bfloat16(), j[None].bfloat16().to(device), angles([theta], q.device)[0])
    expected = q.double() @ torch.matrix_exp(-theta * j.to(device))
    assert (turned - expected).abs().max() < 2e-2 * theta + ROUNDING


def test_many_steps_follow_the_fp64_steps_and_do_not_drift(device: str) -> None:
    """Towards one matrix: the gradient of -<q, a> is -a, and the steps end at the polar factor of a."""
    a = torch.eye(64, device=device) + 0.02 * torch.randn(1, 64, 64).to(device)
    q = orthogonal((1, 64, 64), torch.float32, device)
    if torch.linalg.det(q[0]) < 0:
        q[..., 0] *= -1
    exact = q.double()
    ours, theirs = TensorCoreStep(q, DIRECTIONS["pruned"]), SpectralStep(exact, DIRECTIONS["pruned"])
    thetas = [0.3 * (1 - i / 100) for i in range(100)]
    for theta, pair in zip(thetas, angles(thetas, q.device), strict=True):
        ours(q, -a, pair)
        theirs(exact, -a.double(), theta)
    assert orthogonality_error(q) < ROUNDING
    left, right = (float((a * matrix).sum()) for matrix in (q, exact))
    assert left == pytest.approx(right, rel=2e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("objective", DIRECTIONS)
@pytest.mark.parametrize("shape", [(8, 64, 64), (1, 300, 300)])
def test_the_cpu_does_not_wait_for_the_gpu_cuda(shape: tuple[int, ...], objective: str) -> None:
    q, gradient = orthogonal(shape, torch.float32, "cuda"), skew(shape, torch.float32, "cuda")
    turn, pair = TensorCoreStep(q, DIRECTIONS[objective]), angles([THETA], q.device)[0]
    turn(q, gradient, pair)  # handles and workspaces, made at first use, may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        turn(q, gradient, pair)
    finally:
        torch.cuda.set_sync_debug_mode("default")
