"""batched_qr and cholesky_qr against torch.linalg.qr in fp64, and the properties that define the factors."""

import pytest
import torch
from torch import Tensor

from drot.ops import batched_qr, batched_qr_backward, batched_qr_ref, cholesky_qr

DTYPES = [torch.float32, torch.float64]
SHAPES = [(1, 1), (2, 2), (5, 5), (33, 33), (4, 32, 32), (2, 3, 17, 17), (128, 128), (256, 256), (300, 300)]


def orthogonality_error(q: Tensor) -> float:
    q = q.double()
    return float((q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_factors(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    a = torch.randn(*shape, dtype=dtype, device=device)
    q, r = batched_qr(a)
    eps = torch.finfo(dtype).eps
    n = shape[-1]
    assert orthogonality_error(q) <= max(
        2 * orthogonality_error(torch.linalg.qr(a)[0]), 4 * eps * max(n, 4) ** 0.5
    )
    assert (q.double() @ r.double() - a).norm() <= 4 * eps * n**0.5 * a.norm()
    assert torch.equal(r, r.triu())
    assert (r.diagonal(dim1=-2, dim2=-1) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [3, 64, 300])
def test_unique_factors_match_fp64(n: int, dtype: torch.dtype, device: str) -> None:
    # well-conditioned: small errors of the product are small errors of the factors
    a = (torch.eye(n) + 0.3 / n**0.5 * torch.randn(2, n, n)).to(device, dtype)
    exact = batched_qr_ref(a.double())
    for got, want in zip(batched_qr(a), exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=60 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("n", [4, 40, 300])
def test_identity_comes_back(n: int, device: str) -> None:
    eye = torch.eye(n, device=device)
    q, r = batched_qr(eye)
    assert torch.equal(q, eye)
    assert torch.equal(r, eye)


@pytest.mark.parametrize("n", [6, 300])
def test_signs_of_a_diagonal_matrix(n: int, device: str) -> None:
    a = torch.eye(n, device=device)
    a[1, 1] = -2.0
    a[2, 2] = 0.0
    q, r = batched_qr(a)
    diagonal = torch.ones(n, device=device)
    assert torch.equal(
        r.diagonal(), diagonal.index_fill(0, torch.tensor([1], device=device), 2.0) * (a.diagonal() != 0)
    )
    assert q[1, 1] == -1
    assert orthogonality_error(q) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [16, 100])
def test_singular_and_zero(n: int, dtype: torch.dtype, device: str) -> None:
    a = torch.randn(3, n, n, dtype=dtype, device=device)
    a[0, :, 3] = a[0, :, 1]
    a[1] = 0
    a[2, :, 0] = 0
    q, r = batched_qr(a)
    eps = torch.finfo(dtype).eps
    assert orthogonality_error(q) < 40 * eps
    assert (q.double() @ r.double() - a).abs().max() < 40 * eps * n**0.5
    assert torch.equal(q[1], torch.eye(n, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-140, -100, 100, 126])
def test_extreme_scales(exponent: int, dtype: torch.dtype, device: str) -> None:
    """A power of two scales r alone, even where the squares of a are out of the range of the dtype."""
    exponent *= 1 if dtype == torch.float32 else 7
    a = torch.rand(24, 24, dtype=torch.float64, device=device) - 0.5
    a = torch.ldexp(a, torch.tensor(exponent, device=device)).to(dtype)
    q, r = batched_qr(a)
    exact = torch.ldexp(a.double(), torch.tensor(-exponent, device=device))
    back = torch.ldexp(r.double(), torch.tensor(-exponent, device=device))
    # denormal numbers have fewer digits
    tolerance = 2e-3 if exponent < -126 and dtype == torch.float32 else 1e-5
    assert orthogonality_error(q) < 1e-5
    assert (q.double() @ back - exact).abs().max() < tolerance


def test_graded_columns(device: str) -> None:
    """q is orthogonal where the squares of some columns underflow."""
    a = torch.randn(40, 40, device=device) * torch.logspace(0, -30, 40, device=device)
    q, r = batched_qr(a)
    assert orthogonality_error(q) < 4e-6
    assert (q.double() @ r.double() - a).abs().max() < 1e-5


def test_non_finite_gives_nan(device: str) -> None:
    a = torch.eye(8, device=device).repeat(3, 1, 1)
    a[0, 2, 3] = torch.nan
    a[1, 2, 3] = torch.inf
    q, _ = batched_qr(a)
    assert q[0].isnan().any()
    assert q[1].isnan().any()
    assert torch.equal(q[2], a[2])


@pytest.mark.parametrize("n", [9, 260])
def test_non_contiguous(n: int, device: str) -> None:
    a = torch.randn(4, n, 2 * n, device=device)
    view = a[::2, :, ::2].mT
    for got, want in zip(batched_qr(view), batched_qr(view.contiguous()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5, 5), (3, 0, 0)])
def test_empty(shape: tuple[int, ...], device: str) -> None:
    a = torch.empty(shape, device=device, requires_grad=True)
    q, r = batched_qr(a)
    assert q.shape == r.shape == shape
    (grad,) = torch.autograd.grad(q.sum(), a)
    assert grad.shape == shape


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (2, 2, 4, 4), (19, 19)])
def test_gradcheck(shape: tuple[int, ...], device: str) -> None:
    a = torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: batched_qr(a)[0], (a,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 3), (4, 31, 31), (2, 70, 70), (128, 128), (300, 300)])
def test_gradient_matches_autograd_of_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    n = shape[-1]
    a = (torch.eye(n) + 0.3 / n**0.5 * torch.randn(*shape)).to(device, dtype).requires_grad_()
    g = torch.randn(*shape, dtype=dtype, device=device)
    (got,) = torch.autograd.grad(batched_qr(a)[0], a, g)
    exact_a = a.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(batched_qr_ref(exact_a)[0], exact_a, g.double())
    assert (got - want).norm() <= 60 * torch.finfo(dtype).eps * want.norm()


@pytest.mark.parametrize("n", [16, 300])
def test_backward_under_autocast(n: int, device: str) -> None:
    """Autocast does not reach the products in the op."""
    q, r = batched_qr((torch.eye(n) + 0.3 / n**0.5 * torch.randn(n, n)).to(device))
    gradient = torch.randn(n, n, device=device)
    want = batched_qr_backward(gradient, q, r)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(batched_qr_backward(gradient, q, r), want)


def test_backward_at_r_equal_to_one(device: str) -> None:
    """There the gradient is q tril(S - Sᵀ, -1) with S = qᵀ gq."""
    q = torch.linalg.qr(torch.randn(3, 20, 20, dtype=torch.float64, device=device))[0]
    q, r = batched_qr(q)
    gq = torch.randn_like(q)
    s = q.mT @ gq
    torch.testing.assert_close(batched_qr_backward(gq, q, r), q @ (s - s.mT).tril(-1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", [(8, 64, 64), (300, 300)])
def test_the_cpu_does_not_wait_for_the_gpu_cuda(shape: tuple[int, ...]) -> None:
    a, g = torch.randn(2, *shape, device="cuda")
    calls = [lambda: cholesky_qr(a), lambda: batched_qr_backward(g, *cholesky_qr(a)[:2])]
    if shape[-1] <= 256:
        calls.append(lambda: batched_qr(a))
    for call in calls:
        call()  # handles and workspaces, created at first use, may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_refusals(device: str) -> None:
    a = torch.eye(4, device=device, dtype=torch.float64, requires_grad=True)
    q, r = batched_qr(a)
    with pytest.raises(RuntimeError, match="differentiable in q only"):
        (q.sum() + r.sum()).backward()
    (grad,) = torch.autograd.grad((batched_qr(a)[0] ** 2)[0, 1], a, create_graph=True)
    with pytest.raises(RuntimeError, match="batched_qr has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("a", "message"),
    [
        (torch.zeros(3), r"a must be \[..., n, n\], got \[3\]"),
        (torch.zeros(2, 3, 4), r"a must be \[..., n, n\], got \[2, 3, 4\]"),
        (torch.zeros(3, 3, dtype=torch.float16), "a must be one of Float, Double, got Half"),
        (torch.zeros(3, 3, dtype=torch.int64), "a must be one of Float, Double, got Long"),
    ],
)
def test_wrong_input(a: Tensor, message: str, device: str) -> None:
    with pytest.raises(ValueError, match=message):
        batched_qr(a.to(device))
    if a.dim() > 1:
        with pytest.raises(ValueError, match=message):
            cholesky_qr(a.to(device))


def test_a_gradient_of_cholesky_qr_is_refused(device: str) -> None:
    q, *_ = cholesky_qr(torch.eye(4, dtype=torch.float64, device=device).requires_grad_())
    with pytest.raises(RuntimeError, match="derivative for drot::cholesky_qr is not implemented"):
        q.sum().backward()


def test_wrong_input_of_the_backward(device: str) -> None:
    eye = torch.eye(3, device=device)
    with pytest.raises(ValueError, match=r"gq must have the shape of q, \[3, 3\], got \[2, 2\]"):
        batched_qr_backward(eye[:2, :2], eye, eye)
    with pytest.raises(ValueError, match="r must have the dtype of q, Float, got Double"):
        batched_qr_backward(eye, eye, eye.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 20, 20), (150, 150), (2, 515, 515)])
def test_cholesky_qr(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    n = shape[-1]
    a = (torch.eye(n) + 0.5 / n**0.5 * torch.randn(*shape)).to(device, dtype)
    q, r, reliable = cholesky_qr(a)
    assert reliable.shape == shape[:-2]
    assert reliable.all()
    exact = batched_qr_ref(a.double())
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(q.double(), exact[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(r.double(), exact[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(0, 4, 4), (3, 0, 0)])
def test_cholesky_qr_of_nothing(shape: tuple[int, ...], device: str) -> None:
    q, r, reliable = cholesky_qr(torch.zeros(shape, device=device))
    assert q.shape == r.shape == shape and reliable.shape == shape[:1] and reliable.all()


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6, 1e7, 1e9, 1e12])
def test_cholesky_qr_detects_ill_conditioned_input(condition: float, device: str) -> None:
    """`reliable` is true exactly where q is orthogonal to fp32, even if Cholesky itself succeeds."""
    n = 60
    u, v = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for _ in range(2))
    singular = torch.logspace(0, -float(torch.tensor(condition).log10()), n, dtype=torch.float64)
    a = ((u * singular) @ v).to(device, torch.float32)
    q, _, reliable = cholesky_qr(a)
    # q is rounded to fp32: an error of 6e-8 an element
    error = orthogonality_error(q) if q.isfinite().all() else float("inf")
    assert error < 2e-6 if reliable else error > 1e-8
    if condition <= 1e3:
        assert reliable
    if condition >= 1e9:
        assert not reliable


@pytest.mark.parametrize("shape", [(6, 6), (2, 40, 40)])
@pytest.mark.slow
def test_opcheck(shape: tuple[int, ...], device: str) -> None:
    a = torch.randn(*shape, device=device)
    torch.library.opcheck(torch.ops.drot.batched_qr.default, (a,))
    torch.library.opcheck(torch.ops.drot.cholesky_qr.default, (a,))
    q, r = batched_qr(a)
    torch.library.opcheck(torch.ops.drot.batched_qr_backward.default, (torch.randn_like(q), q, r))
    # with a gradient in q
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.drot.batched_qr.default, (a.clone().requires_grad_(),), test_utils=tests)


@pytest.mark.slow
def test_compile(device: str) -> None:
    def loss(a: Tensor, g: Tensor) -> Tensor:
        return (batched_qr(2 * a)[0] * g).sum()

    a = torch.randn(3, 12, 12, dtype=torch.float64, device=device, requires_grad=True)
    g = torch.randn_like(a)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, g), loss(a, g))
    torch.testing.assert_close(torch.autograd.grad(compiled(a, g), a), torch.autograd.grad(loss(a, g), a))
