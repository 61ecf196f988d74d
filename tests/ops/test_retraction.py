"""Retractions are orthogonal, and agree with the matrix exponential to their order."""

import pytest
import torch

from drot.ops import (
    batched_qr,
    batched_qr_backward,
    cholesky_qr,
    rebased_backward,
    retract,
    retraction,
)

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


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic that fp32 has on a GPU, on every device."""
    monkeypatch.setattr(retraction, "_on_tensor_cores", lambda x: x.dtype == torch.float32)


def orthogonality_error(q: torch.Tensor) -> float:
    q = q.double()
    return float((q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)).abs().max())


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (3, 32, 32), (2, 2, 16, 16), (200, 200)])
@pytest.mark.parametrize("norm", [0.0, 1e-3, 0.5, 8.0])
def test_tensor_cores_lose_no_orthogonality(
    method: str, shape: tuple[int, ...], norm: float, device: str
) -> None:
    q = orthogonal(shape, torch.float32, device)
    omega = skew(shape, 1.0, torch.float64, device)
    omega *= norm / torch.linalg.matrix_norm(omega, 2)[..., None, None].clamp_min(1e-30)
    moved = retract(q, omega.float(), method=method)
    assert orthogonality_error(moved) < 3e-6
    exact = retract(q.double(), omega, method=method)
    # bf16 rounds what is added to q by 2^-9, or 0.2 %
    assert (moved - exact).norm() <= 0.01 * (exact - q).norm() + 1e-6 * shape[-1] ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("norm", "steps"), [(0.5, 2), (1.3, 3)])
def test_fixed_steps_are_enough_as_documented(
    norm: float, steps: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retraction, "_steps_from", lambda *_: pytest.fail("the host waited"))
    for n in (8, 60, 300):
        q, omega = orthogonal((n, n), dtype, device), skew((n, n), 1.0, dtype, device)
        omega *= norm / torch.linalg.matrix_norm(omega, 2)
        assert orthogonality_error(retract(q, omega, "polar", steps=steps)) < 3e-6


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("method", METHODS)
def test_tensor_cores_do_not_drift(method: str, device: str) -> None:
    q = torch.eye(64, device=device)
    for _ in range(100):
        q = retract(q, skew((64, 64), 0.02, torch.float32, device), method=method)
    assert orthogonality_error(q) < 2e-6


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", [(8, 64, 64), (300, 300)])
def test_the_fast_path_does_not_wait_for_the_gpu_cuda(shape: tuple[int, ...]) -> None:
    q, omega = orthogonal(shape, torch.float32, "cuda"), skew(shape, 1e-3, torch.float32, "cuda")
    calls = [
        lambda: retract(q, omega),
        lambda: retract(q, omega, "polar", steps=2),
        lambda: cholesky_qr(q),
        lambda: rebased_backward(omega, q),
        lambda: batched_qr_backward(omega, *cholesky_qr(q)[:2]),
    ]
    if shape[-1] <= 256:
        calls.append(lambda: batched_qr(q))
    for call in calls:
        call()  # handles and workspaces, made at first use, may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
