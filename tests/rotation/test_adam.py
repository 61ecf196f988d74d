"""Steps along Adam's direction, against torch's Adam and the matrix exponential in fp64."""

import pytest
import torch
from test_retraction import orthogonal, skew
from torch import Tensor

from drot.model.rotation import orthogonality_error
from drot.rotation.optimizers import FastOptimizer
from drot.rotation.retraction import DIRECTIONS, SpectralStep, scaled_to_one
from drot.rotation.tensor_cores import TensorCoreStep, angles, inverse_norm

SHAPES = [(1, 2, 2), (1, 7, 7), (3, 32, 32), (1, 130, 130)]
THETA = 0.1


def expected_steps(q: Tensor, gradients: list[Tensor]) -> Tensor:
    """The steps in fp64 with torch's Adam. The scaling removes the factors by which its moments differ."""
    direction = DIRECTIONS["entropy"]
    assert direction.squares is not None
    q = q.double()
    omega = torch.zeros_like(q, requires_grad=True)
    adam = torch.optim.Adam([omega], lr=1.0, betas=(direction.momentum, direction.squares), eps=1e-30)
    for gradient in gradients:
        s = q.mT @ gradient.double()
        omega.grad = s - s.mT
        with torch.no_grad():
            omega.zero_()
        adam.step()
        a = -omega.detach()
        bound = torch.linalg.matrix_power(a, 4).abs().sum(-1).amax(-1).pow(0.25)[:, None, None]
        q = q @ torch.matrix_exp(-THETA * a / bound)
    return q


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_adam(shape: tuple[int, ...], scale: float, device: str) -> None:
    q = orthogonal(shape, torch.float32, device)
    gradients = list(torch.randn(4, *shape, device=device))
    moved, step = q.clone(), SpectralStep(q, DIRECTIONS["entropy"])
    for gradient in gradients:
        step(moved, scale * gradient, THETA)
    expected = expected_steps(q, gradients)
    assert orthogonality_error(moved) < 1e-5
    assert (moved - expected).abs().max() < 1e-3
    assert (moved - q).norm() > 10 * (moved - expected).norm()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_on_tensor_cores(shape: tuple[int, ...], scale: float, device: str) -> None:
    """On a CPU the products are emulated."""
    q = orthogonal(shape, torch.float32, device)
    gradients = list(torch.randn(4, *shape, device=device))
    moved, step = q.clone(), TensorCoreStep(q, DIRECTIONS["entropy"])
    for gradient in gradients:
        step(moved, scale * gradient, angles([THETA], q.device)[0])
    expected = expected_steps(q, gradients)
    assert orthogonality_error(moved) < 2e-2
    assert (moved - expected).norm() < 0.05 * (moved - q).norm() + 2**-8 * q.norm()


def scaled(a: Tensor) -> Tensor:
    if a.dtype == torch.bfloat16:
        return inverse_norm(a)[:, None, None].double() * a.double()
    return scaled_to_one(a)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 33, 256])
def test_the_scaled_norm_is_at_most_one(n: int, dtype: torch.dtype, device: str) -> None:
    given = skew((2, n, n), dtype, device)
    a = scaled(given)
    norms = torch.linalg.matrix_norm(a.double(), 2)
    rounding = 1 + 4 * torch.finfo(dtype).eps
    assert (norms <= rounding).all()
    assert n == 1 or (norms >= n ** (-1 / 8) / rounding).all()
    assert torch.equal(scaled(torch.zeros_like(given)), torch.zeros_like(a))


def test_fast_takes_them_for_the_entropy(device: str) -> None:
    """A first step of Adam has the signs of the gradient's skew-symmetric part; a spectral step has not."""
    gradient = torch.randn(1, 16, 16, device=device)
    s, eye = gradient - gradient.mT, torch.eye(16, device=device)[None]
    same = {}
    for objective in ("entropy", "pruned"):
        optimizer = FastOptimizer([eye], lr=0.01, steps=2, objective=objective)
        optimizer.step([gradient])
        same[objective] = ((eye - optimizer.matrices[0]).sign() == s.sign()).triu(1).sum() == 16 * 15 / 2
    assert same == {"entropy": True, "pruned": False}
