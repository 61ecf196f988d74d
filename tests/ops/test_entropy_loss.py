"""entropy_loss against its definition, in fp64.

The error against fp64 is at most twice that of PyTorch's autograd in the same dtype.
"""

import math

import pytest
import torch
from torch import Tensor

from drot.ops import entropy_loss, entropy_loss_and_grad, entropy_loss_ref

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROWS, COLUMNS = {"rows": True, "columns": False}, {"rows": False, "columns": True}
AXES = [ROWS, COLUMNS, {"rows": True, "columns": True}]


def problem(r: int, c: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    y = torch.randn(r, c, device=device).to(dtype)
    m = torch.rand(c, device=device).to(torch.promote_types(dtype, torch.float32)) + 0.1
    return y, m


def exact(
    y: Tensor, m: Tensor | None, *, rows: bool, columns: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dy and dm in fp64, by the formulas and without autograd."""
    y = y.double()
    factor = torch.ones(y.shape[1], dtype=y.dtype, device=y.device) if m is None else m.double()
    s = y.square() * factor
    log_s = torch.where(s > 0, s, 1).log()
    loss, ds = y.new_zeros(()), torch.zeros_like(s)
    for dim in [1] * rows + [0] * columns:
        z, t = s.sum(dim, keepdim=True), (s * log_s).sum(dim, keepdim=True)
        z = torch.where(z > 0, z, 1)
        loss = loss + (z.log() - t / z).sum()
        ds = ds + torch.where(s > 0, (t / z - log_s) / z, 0)
    return scale * loss, scale * 2 * y * factor * ds, scale * (y.square() * ds).sum(0)


def by_autograd(y: Tensor, m: Tensor | None, **options: object) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (y, m) if t is not None]
    loss = entropy_loss_ref(*leaves, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def check(y: Tensor, m: Tensor | None, **options: object) -> None:
    results = entropy_loss_and_grad(y, m, **options)
    assert results[1].dtype == y.dtype and results[1].shape == y.shape
    wide = torch.promote_types(y.dtype, torch.float32)
    assert results[0].dtype == results[2].dtype == wide
    assert results[2].shape == ((0,) if m is None else m.shape)
    # what rounds is a logarithm, of size 1 to 10, times these; results that cancel to 0 are measured by it
    terms, eps = rounded_terms(y, m, options["rows"], options["columns"]), torch.finfo(wide).eps
    true, theirs = exact(y, m, **options), by_autograd(y, m, **options)
    for i in range(len(theirs)):
        error, allowed = (results[i].double() - true[i]).norm(), 2 * (theirs[i].double() - true[i]).norm()
        floor = 8 * eps * (terms[i] + true[i].norm())
        assert error <= allowed + floor, f"result {i}: {error} against {allowed / 2} of PyTorch"


def rounded_terms(y: Tensor, m: Tensor | None, rows: bool, columns: bool) -> list[Tensor]:
    """Norms of 1, 2p/y and Σ p/m, the factors of log p in the loss, dy and dm, p the shares."""
    y = y.double()
    factor = torch.ones(y.shape[1], dtype=y.dtype, device=y.device) if m is None else m.double()
    s = y.square() * factor
    p = sum(s / s.sum(dim, keepdim=True) for dim in [1] * rows + [0] * columns)
    return [p.sum(), (2 * p / y).norm(), (p.sum(0) / factor).norm()]


@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradients(dtype: torch.dtype, axes: dict, with_factor: bool, device: str) -> None:
    y, m = problem(137, 611, dtype, device)
    check(y, m if with_factor else None, scale=0.7, **axes)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (2, 513), (33, 31), (70, 1024), (2, 65_537)])
def test_odd_sizes(shape: tuple[int, int], axes: dict, device: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check(*problem(*shape, dtype, device), **axes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_matrix_is_its_halves(dtype: torch.dtype, device: str) -> None:
    # large enough to be streamed past the caches of a CPU, in rows that no vector divides
    y, m = problem(4200, 2049, dtype, device)
    loss, dy, dm = entropy_loss_and_grad(y, m)
    halves = [entropy_loss_and_grad(half, m) for half in y.split(2100)]
    assert torch.equal(dy, torch.cat([half[1] for half in halves]))
    torch.testing.assert_close(loss, halves[0][0] + halves[1][0])
    torch.testing.assert_close(dm, halves[0][2] + halves[1][2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("axes", AXES)
def test_strided_input(axes: dict, device: str) -> None:
    y, m = problem(24, 36, torch.float32, device)
    factor = torch.rand(72, device=device)[::2] + 0.1
    for view, f in ((y.t()[:, ::2], m[:12]), (y[::2, 1:25], factor[:24]), (y[:1].expand(5, 36), factor)):
        assert not view.is_contiguous()
        for ours, copied in zip(
            entropy_loss_and_grad(view, f, **axes),
            entropy_loss_and_grad(view.contiguous(), f.contiguous(), **axes),
            strict=True,
        ):
            assert torch.equal(ours, copied)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("axes", AXES)
def test_empty(shape: tuple[int, int], axes: dict, device: str) -> None:
    y, m = problem(*shape, torch.float32, device)
    loss, dy, dm = entropy_loss_and_grad(y, m, **axes)
    assert loss == 0 and dy.shape == shape
    assert torch.equal(dm, torch.zeros(shape[1], device=device))


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-39, -1e-22])  # the last two: y, or y², below fp32's range
def test_what_counts_as_zero(tiny: float, axes: dict, device: str) -> None:
    y, m = problem(9, 12, torch.float32, device)
    y[2], y[:, 3], y[5, ::2] = tiny, tiny, tiny
    m[7] = 0
    none = (y.square() * m) < torch.finfo(torch.float32).tiny
    loss, dy, dm = entropy_loss_and_grad(y, m, **axes)
    expected = exact(torch.where(none, 0, y), m, **axes)
    torch.testing.assert_close(loss.double(), expected[0])
    torch.testing.assert_close(dy.double(), expected[1], rtol=1e-5, atol=1e-6)
    assert bool((dy[none] == 0).all()) and dm[3] == 0 and dm[7] == 0


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_in_some_parts_of_a_long_row(dtype: torch.dtype, given: bool, device: str) -> None:
    """Rows are worked on in blocks, those without zeros in a shorter way; rows with and without follow
    each other."""
    y, m = problem(5, 1300, dtype, device)
    y[1, 700], y[1, 1100], y[3, :512], y[4, 1299] = 0, 1e-30, 0, -0.0
    factor = m if given else None
    none = (y.square() * (m if given else 1)) < torch.finfo(dtype).tiny
    loss, dy, dm = entropy_loss_and_grad(y, factor)
    expected = exact(torch.where(none, 0, y), factor, rows=True, columns=False)
    torch.testing.assert_close(loss.double(), expected[0])
    torch.testing.assert_close(dy.double(), expected[1], rtol=1e-5, atol=1e-6)
    assert bool((dy[none] == 0).all())
    if given:
        torch.testing.assert_close(dm.double(), expected[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", AXES)
def test_nothing_but_zeros(axes: dict, device: str) -> None:
    loss, dy, dm = entropy_loss_and_grad(
        torch.zeros(4, 6, device=device), torch.ones(6, device=device), **axes
    )
    assert loss == 0 and not dy.any() and not dm.any()


@pytest.mark.parametrize("size", [1.5e-19, 1e-6, 1e6, 1e15])
def test_scores_of_any_size(size: float, device: str) -> None:
    """The entropy is that of the shares: equal scores have log n and no gradient, whatever their size."""
    y = torch.full((3, 50), size, device=device)
    loss, dy, _dm = entropy_loss_and_grad(y)
    assert float(loss) == pytest.approx(3 * math.log(50), rel=1e-5)
    # of the size of the rounding of the logarithms, over y
    assert float((dy * y).abs().max()) < 1e-6


def assert_refused(y: Tensor, m: Tensor | None, message: str, device: str, **axes: bool) -> None:
    """By an error, or on a GPU, where nothing waits for values, by a loss of NaN."""
    y, m = y.to(device), None if m is None else m.to(device)
    if device == "cpu":
        with pytest.raises(ValueError, match=message):
            entropy_loss(y, m, **axes)
    else:
        assert entropy_loss(y, m, **axes).isnan()


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_refuses_what_is_not_finite(bad: float, dtype: torch.dtype, axes: dict, device: str) -> None:
    y, m = problem(40, 70, dtype, "cpu")
    y[33, 66] = bad
    where = "row 33" if axes["rows"] else "column 66"
    assert_refused(y, m, f"y²·m must be finite, with finite sums, but {where} sums to", device, **axes)


def test_refuses_bad_factors(device: str) -> None:
    y, m = problem(4, 6, torch.float32, "cpu")
    for bad in (math.inf, math.nan):
        factor = m.clone()
        factor[5] = bad
        assert_refused(y, factor, "y²·m must be finite", device)
    m[1] = -0.5
    assert_refused(y, m, "m must not be negative, got a minimum of -0.5", device)
    assert_refused(y * 1e20, None, "y²·m must be finite, with finite sums, but row 0 sums to inf", device)


@pytest.mark.parametrize(
    ("y", "m", "options", "message"),
    [
        (torch.ones(8), None, {}, r"y must be \[rows, columns\], got \[8\]"),
        (
            torch.ones(2, 8, dtype=torch.int32),
            None,
            {},
            "y must be one of Float, Double, Half, BFloat16, got Int",
        ),
        (torch.ones(2, 8), torch.ones(7), {}, r"m must be \[8\], one value for each column, got \[7\]"),
        (torch.ones(2, 8), torch.ones(1, 8), {}, r"m must be \[8\], one value for each column, got \[1, 8\]"),
        (torch.ones(2, 8), torch.ones(8).double(), {}, "m must be one of Float, got Double"),
        (torch.ones(2, 8).double(), torch.ones(8), {}, "m must be one of Double, got Float"),
        (torch.ones(2, 8).half(), torch.ones(8).half(), {}, "m must be one of Float, got Half"),
        (torch.ones(2, 8), None, {"rows": False}, "needs rows=True, columns=True or both, got neither"),
        (torch.ones(2, 8), None, {"scale": math.inf}, "scale must be finite, got inf"),
    ],
)
def test_refusals(y: Tensor, m: Tensor | None, options: dict, message: str, device: str) -> None:
    with pytest.raises(ValueError, match=message):
        entropy_loss(y.to(device), None if m is None else m.to(device), **options)


@pytest.mark.parametrize("axes", AXES)
def test_deterministic(axes: dict, device: str) -> None:
    y, m = problem(515, 700, torch.float32, device)
    first = entropy_loss_and_grad(y, m, **axes)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, threads):
            torch.set_num_threads(count)
            again = entropy_loss_and_grad(y, m, **axes)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_gradcheck(device: str) -> None:
    y, m = problem(5, 6, torch.float64, device)
    for axes in AXES:
        inputs = (y.requires_grad_(), m.requires_grad_())
        assert torch.autograd.gradcheck(lambda y, m: entropy_loss(y, m, **axes), inputs)  # noqa: B023


def test_opcheck(device: str) -> None:
    y, m = problem(5, 6, torch.float32, device)
    torch.library.opcheck(torch.ops.drot.entropy_loss, (y.requires_grad_(), m.requires_grad_()))
    torch.library.opcheck(torch.ops.drot.entropy_loss, (y, None), {"columns": True})
    torch.library.opcheck(torch.ops.drot.entropy_loss, (y.detach().bfloat16(), m.detach()))


def test_in_a_compiled_function(device: str) -> None:
    def loss(w: Tensor, r: Tensor) -> Tensor:
        return 2 * entropy_loss((w @ r).tanh(), columns=True)

    w, r = torch.randn(16, 32, device=device), torch.randn(32, 32, device=device, requires_grad=True)
    compiled = torch.compile(loss, fullgraph=True)(w, r)
    torch.testing.assert_close(compiled, loss(w, r))
    (ours,) = torch.autograd.grad(compiled, r)
    (expected,) = torch.autograd.grad(2 * entropy_loss_ref((w @ r).tanh(), columns=True), r)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_refuses_a_second_derivative(device: str) -> None:
    y, m = problem(5, 6, torch.float32, device)
    (dy,) = torch.autograd.grad(entropy_loss(y.requires_grad_(), m), y, create_graph=True)
    with pytest.raises(NotImplementedError, match="entropy_loss is differentiable once"):
        dy.square().sum().backward()
