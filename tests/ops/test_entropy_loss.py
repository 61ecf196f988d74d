"""entropy_loss against its definition in fp64.

Its error is at most twice the error of PyTorch's autograd in the same dtype.
"""

import itertools
import math

import pytest
import torch
from same_bytes import with_threads
from torch import Tensor

from drot.ops import entropy_loss, entropy_loss_and_grad, entropy_loss_ref

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROWS, COLUMNS = {"rows": True, "columns": False}, {"rows": False, "columns": True}
AXES = [ROWS, COLUMNS, {"rows": True, "columns": True}]


def problem(r: int, c: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    y = torch.randn(r, c, device=device).to(dtype)
    column_scale = torch.rand(c, device=device).to(torch.promote_types(dtype, torch.float32)) + 0.1
    return y, column_scale


def exact(
    y: Tensor, column_scale: Tensor | None, *, rows: bool, columns: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dy and dcolumn_scale by the formulas in fp64, without autograd."""
    y = y.double()
    column_scale = torch.ones_like(y[0]) if column_scale is None else column_scale.double()
    s = y.square() * column_scale
    log_s = torch.where(s > 0, s, 1).log()
    loss, ds = y.new_zeros(()), torch.zeros_like(s)
    for dim in [1] * rows + [0] * columns:
        z, t = s.sum(dim, keepdim=True), (s * log_s).sum(dim, keepdim=True)
        z = torch.where(z > 0, z, 1)
        loss = loss + (z.log() - t / z).sum()
        ds = ds + torch.where(s > 0, (t / z - log_s) / z, 0)
    return scale * loss, scale * 2 * y * column_scale * ds, scale * (y.square() * ds).sum(0)


def by_autograd(y: Tensor, column_scale: Tensor | None, **options: object) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (y, column_scale) if t is not None]
    loss = entropy_loss_ref(*leaves, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def check(y: Tensor, column_scale: Tensor | None, **options: object) -> None:
    results = entropy_loss_and_grad(y, column_scale, **options)
    assert results[1].dtype == y.dtype and results[1].shape == y.shape
    wide = torch.promote_types(y.dtype, torch.float32)
    assert results[0].dtype == results[2].dtype == wide
    assert results[2].shape == ((0,) if column_scale is None else column_scale.shape)
    # the rounding error is that of a logarithm, of size 1 to 10, times these terms; it bounds results near 0
    terms, eps = rounded_terms(y, column_scale, options["rows"], options["columns"]), torch.finfo(wide).eps
    true, by_torch = exact(y, column_scale, **options), by_autograd(y, column_scale, **options)
    for i in range(len(by_torch)):
        error, allowed = (results[i].double() - true[i]).norm(), 2 * (by_torch[i].double() - true[i]).norm()
        floor = 8 * eps * (terms[i] + true[i].norm())
        assert error <= allowed + floor, f"result {i}: {error} against {allowed / 2} of PyTorch"


def rounded_terms(y: Tensor, column_scale: Tensor | None, rows: bool, columns: bool) -> list[Tensor]:
    """Norms of p, 2p/y and Σ p/column_scale, the factors of log p in the three results; p = s / Σ s."""
    y = y.double()
    column_scale = torch.ones_like(y[0]) if column_scale is None else column_scale.double()
    s = y.square() * column_scale
    p = sum(s / s.sum(dim, keepdim=True) for dim in [1] * rows + [0] * columns)
    return [p.sum(), (2 * p / y).norm(), (p.sum(0) / column_scale).norm()]


@pytest.mark.parametrize("with_column_scale", [True, False])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradients(dtype: torch.dtype, axes: dict, with_column_scale: bool, device: str) -> None:
    y, column_scale = problem(137, 611, dtype, device)
    check(y, column_scale if with_column_scale else None, scale=0.7, **axes)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (2, 513), (33, 31), (70, 1024), (2, 65_537)])
def test_odd_sizes(shape: tuple[int, int], axes: dict, device: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check(*problem(*shape, dtype, device), **axes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_matrix_is_its_halves(dtype: torch.dtype, device: str) -> None:
    # large enough for the CPU's non-temporal stores; no vector width divides the columns
    y, column_scale = problem(4200, 2049, dtype, device)
    loss, dy, dcolumn_scale = entropy_loss_and_grad(y, column_scale)
    halves = [entropy_loss_and_grad(half, column_scale) for half in y.split(2100)]
    assert torch.equal(dy, torch.cat([half[1] for half in halves]))
    torch.testing.assert_close(loss, halves[0][0] + halves[1][0])
    torch.testing.assert_close(dcolumn_scale, halves[0][2] + halves[1][2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("axes", AXES)
def test_strided_input(axes: dict, device: str) -> None:
    y, column_scale = problem(24, 36, torch.float32, device)
    strided = torch.rand(72, device=device)[::2] + 0.1
    for view, f in (
        (y.t()[:, ::2], column_scale[:12]),
        (y[::2, 1:25], strided[:24]),
        (y[:1].expand(5, 36), strided),
    ):
        assert not view.is_contiguous()
        for got, copied in zip(
            entropy_loss_and_grad(view, f, **axes),
            entropy_loss_and_grad(view.contiguous(), f.contiguous(), **axes),
            strict=True,
        ):
            assert torch.equal(got, copied)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("axes", AXES)
def test_empty(shape: tuple[int, int], axes: dict, device: str) -> None:
    y, column_scale = problem(*shape, torch.float32, device)
    loss, dy, dcolumn_scale = entropy_loss_and_grad(y, column_scale, **axes)
    assert loss == 0 and dy.shape == shape
    assert torch.equal(dcolumn_scale, torch.zeros(shape[1], device=device))


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-39, -1e-22])  # 1e-39 and (1e-22)² are not normal in fp32
def test_what_counts_as_zero(tiny: float, axes: dict, device: str) -> None:
    y, column_scale = problem(9, 12, torch.float32, device)
    y[2], y[:, 3], y[5, ::2] = tiny, tiny, tiny
    column_scale[7] = 0
    none = (y.square() * column_scale) < torch.finfo(torch.float32).tiny
    loss, dy, dcolumn_scale = entropy_loss_and_grad(y, column_scale, **axes)
    expected = exact(torch.where(none, 0, y), column_scale, **axes)
    torch.testing.assert_close(loss.double(), expected[0])
    torch.testing.assert_close(dy.double(), expected[1], rtol=1e-5, atol=1e-6)
    assert bool((dy[none] == 0).all()) and dcolumn_scale[3] == 0 and dcolumn_scale[7] == 0


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_in_some_parts_of_a_long_row(dtype: torch.dtype, given: bool, device: str) -> None:
    """A row is computed in blocks; blocks with and without zeros take different code."""
    y, scales = problem(5, 1300, dtype, device)
    y[1, 700], y[1, 1100], y[3, :512], y[4, 1299] = 0, 1e-30, 0, -0.0
    column_scale = scales if given else None
    none = (y.square() * (scales if given else 1)) < torch.finfo(dtype).tiny
    loss, dy, dcolumn_scale = entropy_loss_and_grad(y, column_scale)
    expected = exact(torch.where(none, 0, y), column_scale, rows=True, columns=False)
    torch.testing.assert_close(loss.double(), expected[0])
    torch.testing.assert_close(dy.double(), expected[1], rtol=1e-5, atol=1e-6)
    assert bool((dy[none] == 0).all())
    if given:
        torch.testing.assert_close(dcolumn_scale.double(), expected[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", AXES)
def test_nothing_but_zeros(axes: dict, device: str) -> None:
    loss, dy, dcolumn_scale = entropy_loss_and_grad(
        torch.zeros(4, 6, device=device), torch.ones(6, device=device), **axes
    )
    assert loss == 0 and not dy.any() and not dcolumn_scale.any()


@pytest.mark.parametrize("size", [1.5e-19, 1e-6, 1e6, 1e15])
def test_scores_of_any_size(size: float, device: str) -> None:
    """n equal scores of any size have entropy log n and gradient 0."""
    y = torch.full((3, 50), size, device=device)
    loss, dy, _dcolumn_scale = entropy_loss_and_grad(y)
    assert float(loss) == pytest.approx(3 * math.log(50), rel=1e-5)
    # dy is the rounding error of the logarithms over y
    assert float((dy * y).abs().max()) < 1e-6


def assert_refused(y: Tensor, column_scale: Tensor | None, message: str, device: str, **axes: bool) -> None:
    """A CPU raises ValueError; on a GPU the loss is NaN, because the CPU does not wait for the values."""
    y, column_scale = y.to(device), None if column_scale is None else column_scale.to(device)
    if device == "cpu":
        with pytest.raises(ValueError, match=message):
            entropy_loss(y, column_scale, **axes)
    else:
        assert entropy_loss(y, column_scale, **axes).isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_refuses_what_is_not_finite(dtype: torch.dtype, device: str) -> None:
    y, column_scale = problem(40, 70, dtype, "cpu")
    for axes, bad in itertools.product(AXES, (math.inf, -math.inf, math.nan)):
        y[33, 66] = bad
        where = "row 33" if axes["rows"] else "column 66"
        message = f"y² · column_scale must be finite, with finite sums, but {where} sums to"
        assert_refused(y, column_scale, message, device, **axes)


def test_refuses_a_bad_column_scale(device: str) -> None:
    y, column_scale = problem(4, 6, torch.float32, "cpu")
    for bad in (math.inf, math.nan):
        bad_scale = column_scale.clone()
        bad_scale[5] = bad
        assert_refused(y, bad_scale, "y² · column_scale must be finite", device)
    column_scale[1] = -0.5
    assert_refused(y, column_scale, "column_scale must not be negative, got a minimum of -0.5", device)
    assert_refused(
        y * 1e20, None, "y² · column_scale must be finite, with finite sums, but row 0 sums to inf", device
    )


@pytest.mark.parametrize(
    ("y", "column_scale", "options", "message"),
    [
        (torch.ones(8), None, {}, r"y must be \[rows, columns\], got \[8\]"),
        (
            torch.ones(2, 8, dtype=torch.int32),
            None,
            {},
            "y must be one of Float, Double, Half, BFloat16, got Int",
        ),
        (
            torch.ones(2, 8),
            torch.ones(7),
            {},
            r"column_scale must be \[8\], one value for each column, got \[7\]",
        ),
        (
            torch.ones(2, 8),
            torch.ones(1, 8),
            {},
            r"column_scale must be \[8\], one value for each column, got \[1, 8\]",
        ),
        (torch.ones(2, 8), torch.ones(8).double(), {}, "column_scale must be one of Float, got Double"),
        (torch.ones(2, 8).double(), torch.ones(8), {}, "column_scale must be one of Double, got Float"),
        (torch.ones(2, 8).half(), torch.ones(8).half(), {}, "column_scale must be one of Float, got Half"),
        (torch.ones(2, 8), None, {"rows": False}, "needs rows=True, columns=True or both, got neither"),
        (torch.ones(2, 8), None, {"scale": math.inf}, "scale must be finite, got inf"),
    ],
)
def test_refusals(y: Tensor, column_scale: Tensor | None, options: dict, message: str, device: str) -> None:
    with pytest.raises(ValueError, match=message):
        entropy_loss(y.to(device), None if column_scale is None else column_scale.to(device), **options)


@pytest.mark.parametrize("axes", AXES)
def test_deterministic(axes: dict, device: str) -> None:
    y, column_scale = problem(515, 700, torch.float32, device)
    first = entropy_loss_and_grad(y, column_scale, **axes)
    for count in (1, 3, torch.get_num_threads()):
        with with_threads(count):
            again = entropy_loss_and_grad(y, column_scale, **axes)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_gradcheck(device: str) -> None:
    y, column_scale = problem(5, 6, torch.float64, device)
    for axes in AXES:
        inputs = (y.requires_grad_(), column_scale.requires_grad_())
        assert torch.autograd.gradcheck(lambda y, s: entropy_loss(y, s, **axes), inputs)  # noqa: B023


@pytest.mark.slow
def test_opcheck(device: str) -> None:
    y, column_scale = problem(5, 6, torch.float32, device)
    torch.library.opcheck(torch.ops.drot.entropy_loss, (y.requires_grad_(), column_scale.requires_grad_()))
    torch.library.opcheck(torch.ops.drot.entropy_loss, (y, None), {"columns": True})
    torch.library.opcheck(torch.ops.drot.entropy_loss, (y.detach().bfloat16(), column_scale.detach()))


@pytest.mark.slow
def test_in_a_compiled_function(device: str) -> None:
    def loss(w: Tensor, r: Tensor) -> Tensor:
        return 2 * entropy_loss((w @ r).tanh(), columns=True)

    w, r = torch.randn(16, 32, device=device), torch.randn(32, 32, device=device, requires_grad=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(w, r)
    torch.testing.assert_close(compiled, loss(w, r))
    (got,) = torch.autograd.grad(compiled, r)
    (expected,) = torch.autograd.grad(2 * entropy_loss_ref((w @ r).tanh(), columns=True), r)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_refuses_a_second_derivative(device: str) -> None:
    y, column_scale = problem(5, 6, torch.float32, device)
    (dy,) = torch.autograd.grad(entropy_loss(y.requires_grad_(), column_scale), y, create_graph=True)
    with pytest.raises(NotImplementedError, match="entropy_loss is differentiable once"):
        dy.square().sum().backward()
