"""Retractions are orthogonal and agree with the matrix exponential to second order."""

import pytest
import torch

from drot.ops import batched_qr, batched_qr_backward, cholesky_qr
from drot.rotation import retraction
from drot.rotation.retraction import retract


def orthogonal(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].to(device, dtype)


def skew(shape: tuple[int, ...], size: float, dtype: torch.dtype, device: str) -> torch.Tensor:
    a = torch.randn(*shape, dtype=torch.float64)
    return (size * (a - a.mT)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (3, 32, 32), (130, 130)])
@pytest.mark.parametrize("size", [0.0, 1e-3, 0.3])
def test_orthogonal(dtype: torch.dtype, shape: tuple[int, ...], size: float, device: str) -> None:
    q, omega = orthogonal(shape, dtype, device), skew(shape, size, dtype, device)
    moved = retract(q, omega).double()
    eye = torch.eye(shape[-1], dtype=torch.float64, device=device)
    tolerance = 3e-6 if dtype == torch.float32 else 1e-13
    assert (moved.mT @ moved - eye).abs().max() < tolerance
    # a retraction does not change the sign of the determinant
    assert torch.allclose(torch.linalg.det(moved), torch.linalg.det(q.double()), atol=1e-3)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the arithmetic of fp32 on a GPU on every device."""
    monkeypatch.setattr(retraction, "_on_tensor_cores", lambda x: x.dtype == torch.float32)


def orthogonality_error(q: torch.Tensor) -> float:
    q = q.double()
    return float((q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)).abs().max())


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (3, 32, 32), (2, 2, 16, 16), (200, 200)])
@pytest.mark.parametrize("norm", [0.0, 1e-3, 0.5, 8.0])
def test_tensor_cores_lose_no_orthogonality(shape: tuple[int, ...], norm: float, device: str) -> None:
    q = orthogonal(shape, torch.float32, device)
    omega = skew(shape, 1.0, torch.float64, device)
    omega *= norm / torch.linalg.matrix_norm(omega, 2)[..., None, None].clamp_min(1e-30)
    moved = retract(q, omega.float())
    assert orthogonality_error(moved) < 3e-6
    exact = retract(q.double(), omega)
    # rounding to bf16 changes the step by up to 2^-9, or 0.2 %
    assert (moved - exact).norm() <= 0.01 * (exact - q).norm() + 1e-6 * shape[-1] ** 0.5


@pytest.mark.usefixtures("tensor_cores")
def test_tensor_cores_do_not_drift(device: str) -> None:
    q = torch.eye(64, device=device)
    for _ in range(100):
        q = retract(q, skew((64, 64), 0.02, torch.float32, device))
    assert orthogonality_error(q) < 2e-6


def test_agrees_with_expm(device: str) -> None:
    """The error against expm is proportional to the cube of the step."""
    q = orthogonal((2, 12, 12), torch.float64, device)
    direction = skew((2, 12, 12), 1.0, torch.float64, device)

    def error(h: float) -> float:
        return float((retract(q, h * direction) - q @ torch.matrix_exp(h * direction)).norm())

    order = torch.log10(torch.tensor(error(1e-2) / error(1e-3)))
    assert float(order) == pytest.approx(3, abs=0.15)


def test_many_steps_do_not_drift(device: str) -> None:
    q = torch.eye(64, device=device)
    for _ in range(300):
        q = retract(q, skew((64, 64), 0.02, torch.float32, device))
    eye = torch.eye(64, dtype=torch.float64, device=device)
    assert (q.double().mT @ q.double() - eye).abs().max() < 2e-6


def test_empty(device: str) -> None:
    assert retract(torch.empty(0, 4, 4, device=device), torch.empty(0, 4, 4, device=device)).shape == (
        0,
        4,
        4,
    )


def test_wrong_input() -> None:
    eye = torch.eye(3)
    with pytest.raises(
        ValueError, match=r"q and omega must both be \[..., n, n\], got \[3, 3\] and \[2, 2\]"
    ):
        retract(eye, torch.eye(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", [(8, 64, 64), (300, 300)])
def test_the_fast_path_does_not_wait_for_the_gpu_cuda(shape: tuple[int, ...]) -> None:
    q, omega = orthogonal(shape, torch.float32, "cuda"), skew(shape, 1e-3, torch.float32, "cuda")
    calls = [
        lambda: retract(q, omega),
        lambda: cholesky_qr(q),
        lambda: batched_qr_backward(omega, *cholesky_qr(q)[:2]),
    ]
    if shape[-1] <= 256:
        calls.append(lambda: batched_qr(q))
    for call in calls:
        call()  # the first call creates handles and workspaces, which may wait for the GPU
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
