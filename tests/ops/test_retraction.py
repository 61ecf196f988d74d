"""Retractions are orthogonal, and agree with the matrix exponential to their order."""

import pytest
import torch

from drot.ops import batched_qr, batched_qr_backward, rebased_backward, retract

METHODS = ["cayley", "polar", "qr"]


def orthogonal(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].to(device, dtype)


def skew(shape: tuple[int, ...], size: float, dtype: torch.dtype, device: str) -> torch.Tensor:
    a = torch.randn(*shape, dtype=torch.float64)
    return (size * (a - a.mT)).to(device, dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (3, 32, 32), (130, 130)])
@pytest.mark.parametrize("size", [0.0, 1e-3, 0.3])
def test_orthogonal(
    method: str, dtype: torch.dtype, shape: tuple[int, ...], size: float, device: str
) -> None:
    q, omega = orthogonal(shape, dtype, device), skew(shape, size, dtype, device)
    moved = retract(q, omega, method=method).double()
    eye = torch.eye(shape[-1], dtype=torch.float64, device=device)
    tolerance = 3e-6 if dtype == torch.float32 else 1e-13
    assert (moved.mT @ moved - eye).abs().max() < tolerance
    # a retraction stays in the component of q
    assert torch.allclose(torch.linalg.det(moved), torch.linalg.det(q.double()), atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_agrees_with_expm(method: str, device: str) -> None:
    """The error against expm falls with the step's square (qr), or its cube (cayley, polar)."""
    q = orthogonal((2, 12, 12), torch.float64, device)
    direction = skew((2, 12, 12), 1.0, torch.float64, device)

    def error(h: float) -> float:
        return float((retract(q, h * direction, method=method) - q @ torch.matrix_exp(h * direction)).norm())

    order = torch.log10(torch.tensor(error(1e-2) / error(1e-3)))
    assert float(order) == pytest.approx(2 if method == "qr" else 3, abs=0.15)


def test_many_steps_do_not_drift(device: str) -> None:
    q = torch.eye(64, device=device)
    for _ in range(300):
        q = retract(q, skew((64, 64), 0.02, torch.float32, device))
    eye = torch.eye(64, dtype=torch.float64, device=device)
    assert (q.double().mT @ q.double() - eye).abs().max() < 2e-6


def test_rebased_backward_is_the_backward_at_r_equal_one(device: str) -> None:
    q = orthogonal((3, 20, 20), torch.float64, device)
    g = torch.randn_like(q)
    factors = batched_qr(q)
    torch.testing.assert_close(factors[0], q)
    torch.testing.assert_close(rebased_backward(g, q), batched_qr_backward(g, *factors))


def test_empty(device: str) -> None:
    assert retract(torch.empty(0, 4, 4, device=device), torch.empty(0, 4, 4, device=device)).shape == (
        0,
        4,
        4,
    )


def test_wrong_input() -> None:
    eye = torch.eye(3)
    with pytest.raises(ValueError, match="method must be one of cayley, polar, qr; got 'exp'"):
        retract(eye, eye, method="exp")
    with pytest.raises(
        ValueError, match=r"q and omega must both be \[..., n, n\], got \[3, 3\] and \[2, 2\]"
    ):
        retract(eye, torch.eye(2))
