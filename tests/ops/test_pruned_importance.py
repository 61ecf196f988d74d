"""pruned_importance against its definition in fp64."""

import itertools
import math

import pytest
import torch
from same_bytes import with_threads
from torch import Tensor

from drot.ops import nm_mask, pruned_importance, pruned_importance_and_grad, pruned_importance_ref

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PATTERNS = [
    (2, 4),
    (4, 8),
    (1, 2),
    (1, 3),
    (3, 5),
    (7, 12),
    (8, 16),
    (13, 24),
    (16, 32),
    (0, 4),
    (4, 4),
    (1, 1),
]
WHOLE_ROWS = [(30, 0), (0, 0), (1, 0), (101, 0)]


def exact(y: Tensor, column_scale: Tensor | None, prune: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dy and dcolumn_scale in fp64, for the mask of the scores in the op's dtype."""
    wide = torch.promote_types(y.dtype, torch.float32)
    if column_scale is None:
        column_scale = torch.ones(y.shape[1], dtype=wide, device=y.device)
    removed = nm_mask(y.to(wide) * (y.to(wide) * column_scale), prune, group).double()
    y, column_scale = y.double(), column_scale.double()
    return (removed * y**2 * column_scale).sum(), removed * 2 * y * column_scale, (removed * y**2).sum(0)


@pytest.mark.parametrize("with_column_scale", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradients(dtype: torch.dtype, with_column_scale: bool, device: str) -> None:
    for prune, group in PATTERNS + WHOLE_ROWS:
        check_value_and_gradients(dtype, prune, group, with_column_scale, device)


def check_value_and_gradients(
    dtype: torch.dtype, prune: int, group: int, with_column_scale: bool, device: str
) -> None:
    width = 43 * group or 101  # not a multiple of the groups that the kernels rank together
    y = torch.randn(37, width, device=device).to(dtype)
    y[0] = 1.0  # ties
    wide = torch.promote_types(dtype, torch.float32)
    column_scale = (torch.rand(width, device=device).to(wide) + 0.1) if with_column_scale else None
    loss, dy, dcolumn_scale = pruned_importance_and_grad(y, column_scale, prune=prune, group=group, scale=0.7)
    sums, expected_dy, expected_dcolumn_scale = exact(y, column_scale, prune, group)
    eps, precision = torch.finfo(dtype).eps, torch.finfo(wide).eps
    assert dy.dtype == dtype and loss.dtype == dcolumn_scale.dtype == wide
    torch.testing.assert_close(loss.double(), 0.7 * sums, rtol=16 * precision, atol=0)
    spacing = torch.finfo(dtype).smallest_normal * eps  # of the smallest numbers
    torch.testing.assert_close(dy.double(), 0.7 * expected_dy, rtol=2 * eps, atol=spacing)
    if column_scale is None:
        assert dcolumn_scale.shape == (0,)
    else:
        torch.testing.assert_close(
            dcolumn_scale.double(), 0.7 * expected_dcolumn_scale, rtol=16 * precision, atol=0
        )
    reference = pruned_importance_ref(y, column_scale, prune=prune, group=group, scale=0.7)
    torch.testing.assert_close(loss, reference, rtol=64 * precision, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_two_bytes_comes_through(dtype: torch.dtype, device: str) -> None:
    # all are removed, and scale = 0.5 makes dy equal to y: every number is read and written back
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite() & (every.abs() < 1e18)]  # whose squares are finite too
    y = every[None].to(device)
    _loss, dy, _dcolumn_scale = pruned_importance_and_grad(y, prune=y.shape[1], group=0, scale=0.5)
    assert torch.equal(dy, y)


def test_ties_go_by_position(device: str) -> None:
    y = torch.tensor([[3.0, -1.0, 1.0, 1.0, 0.0, -0.0, 2.0, 0.0]], device=device)
    kept = {4: [[1, 0, 0, 1, 0, 0, 1, 1]], 8: [[1, 0, 1, 1, 0, 0, 1, 0]], 0: [[1, 0, 1, 1, 0, 0, 1, 0]]}
    for group, expected in kept.items():
        prune = 2 if group == 4 else 4
        y_one = y + 0.0
        column_scale = torch.ones(8, device=device)
        _loss, dy, dcolumn_scale = pruned_importance_and_grad(y_one, column_scale, prune=prune, group=group)
        removed = torch.tensor(expected, device=device) == 0
        assert torch.equal(dy, torch.where(removed, 2 * y, 0))
        assert torch.equal(dcolumn_scale, torch.where(removed, y**2, 0)[0])
    # equal scores only: the first half of each row goes
    y = torch.full((5, 4097), -0.5, device=device)
    _loss, dy, _dcolumn_scale = pruned_importance_and_grad(y, prune=2048, group=0)
    assert bool((dy[:, :2048] == -1).all()) and not dy[:, 2048:].any()


def test_scores_that_differ_in_the_last_bit(device: str) -> None:
    y = torch.ones(3, 1000, device=device)
    y[:, 500:] = 1 - 2.0**-24
    _loss, dy, _dcolumn_scale = pruned_importance_and_grad(y, prune=600, group=0)
    assert bool(dy[:, 500:].all()) and bool(dy[:, :100].all()) and not dy[:, 100:500].any()


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 65_537), (65, 4097), (40, 513)])
def test_odd_sizes_of_whole_rows(shape: tuple[int, int], device: str) -> None:
    y = torch.randn(shape, device=device)
    column_scale = torch.rand(shape[1], device=device) + 0.1
    prune = (shape[1] + 1) // 2
    sums, expected_dy, expected_dcolumn_scale = exact(y, column_scale, prune, 0)
    loss, dy, dcolumn_scale = pruned_importance_and_grad(y, column_scale, prune=prune, group=0)
    torch.testing.assert_close(loss.double(), sums, rtol=1e-6, atol=0)
    torch.testing.assert_close(dy.double(), expected_dy, rtol=1e-6, atol=0)
    torch.testing.assert_close(dcolumn_scale.double(), expected_dcolumn_scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_matrix_is_its_halves(dtype: torch.dtype, device: str) -> None:
    # large enough for the CPU's non-temporal stores; no vector width divides the columns
    y = torch.randn(4200, 2052, device=device).to(dtype)
    loss, dy, _dcolumn_scale = pruned_importance_and_grad(y, prune=2, group=4)
    halves = [pruned_importance_and_grad(half, prune=2, group=4) for half in y.split(2100)]
    assert torch.equal(dy, torch.cat([half[1] for half in halves]))
    torch.testing.assert_close(loss, halves[0][0] + halves[1][0])


@pytest.mark.parametrize("group", [4, 0])
def test_strided_input(group: int, device: str) -> None:
    y, column_scale = torch.randn(24, 36, device=device), torch.rand(72, device=device)[::2] + 0.1
    for view, f in (
        (y.t()[:, ::2], column_scale[:12]),
        (y[::2, 1:25], column_scale[:24]),
        (y[:1].expand(5, 36), column_scale),
    ):
        assert not view.is_contiguous()
        got = pruned_importance_and_grad(view, f, prune=2, group=group)
        copied = pruned_importance_and_grad(view.contiguous(), f.contiguous(), prune=2, group=group)
        assert all(torch.equal(a, b) for a, b in zip(got, copied, strict=True))


@pytest.mark.parametrize(("shape", "group"), [((0, 8), 4), ((5, 0), 4), ((5, 0), 0), ((0, 0), 0)])
def test_empty(shape: tuple[int, int], group: int, device: str) -> None:
    y, column_scale = torch.empty(shape, device=device), torch.ones(shape[1], device=device)
    loss, dy, dcolumn_scale = pruned_importance_and_grad(y, column_scale, prune=0, group=group)
    assert loss == 0 and dy.shape == shape and torch.equal(dcolumn_scale, torch.zeros_like(column_scale))


def test_denormal_scores_have_an_order(device: str) -> None:
    y = torch.tensor([[1e-20, 2e-20, 3e-20, 4e-20]], dtype=torch.float32, device=device)
    _loss, dy, _dcolumn_scale = pruned_importance_and_grad(y, prune=2, group=4)
    assert torch.equal(dy != 0, torch.tensor([[True, True, False, False]], device=device))
    zeros = pruned_importance_and_grad(torch.zeros(2, 8, device=device), prune=2, group=4)
    assert zeros[0] == 0 and not zeros[1].any()


def assert_refused(y: Tensor, column_scale: Tensor | None, group: int, message: str, device: str) -> None:
    """A CPU raises ValueError; on a GPU the loss is NaN, because the CPU does not wait for the values."""
    y, column_scale = y.to(device), None if column_scale is None else column_scale.to(device)
    if device == "cpu":
        with pytest.raises(ValueError, match=message):
            pruned_importance(y, column_scale, prune=2, group=group)
    else:
        assert pruned_importance(y, column_scale, prune=2, group=group).isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_refuses_what_is_not_finite(dtype: torch.dtype, device: str) -> None:
    y = torch.randn(40, 700).to(dtype)
    for group, bad in itertools.product((4, 5, 0), (math.inf, -math.inf, math.nan)):
        y[33, 666] = bad
        message = "y² · column_scale must be finite, got .* in row 33, column 666"
        assert_refused(y, None, group, message, device)


def test_refuses_a_bad_column_scale(device: str) -> None:
    y, column_scale = torch.randn(4, 8), torch.ones(8)
    for bad in (math.inf, math.nan):
        column_scale[5] = bad
        assert_refused(y, column_scale, 4, "column_scale must be finite", device)
    column_scale[5] = -0.5
    assert_refused(y, column_scale, 4, "column_scale must not be negative, got a minimum of -0.5", device)
    assert_refused(
        y.abs().add(1) * 1e20, None, 4, "y² · column_scale must be finite, got inf of y = ", device
    )


@pytest.mark.parametrize(
    ("y", "column_scale", "prune", "group", "message"),
    [
        (torch.ones(8), None, 2, 4, r"y must be \[rows, columns\], got \[8\]"),
        (torch.ones(2, 8, dtype=torch.int32), None, 2, 4, "y must be one of Float, .*, got Int"),
        (
            torch.ones(2, 8),
            torch.ones(7),
            2,
            4,
            r"column_scale must be \[8\], one value for each column, got \[7\]",
        ),
        (torch.ones(2, 8), torch.ones(8).double(), 2, 4, "column_scale must be one of Float, got Double"),
        (torch.ones(2, 8).double(), torch.ones(8), 2, 4, "column_scale must be one of Double, got Float"),
        (torch.ones(2, 8), None, 2, 3, "group must divide the 8 columns, got 3"),
        (torch.ones(2, 66), None, 2, 33, r"group must be 0 \(the whole row\) or 1 to 32, got 33"),
        (torch.ones(2, 8), None, 5, 4, "prune must be 0 to 4, the width of a group, got 5"),
        (torch.ones(2, 8), None, -1, 4, "prune must be 0 to 4, the width of a group, got -1"),
        (torch.ones(2, 8), None, 9, 0, "prune must be 0 to 8, the width of a group, got 9"),
    ],
)
def test_refusals(
    y: Tensor, column_scale: Tensor | None, prune: int, group: int, message: str, device: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pruned_importance(
            y.to(device), None if column_scale is None else column_scale.to(device), prune=prune, group=group
        )


def test_refuses_an_infinite_scale(device: str) -> None:
    with pytest.raises(ValueError, match="scale must be finite, got inf"):
        pruned_importance(torch.ones(2, 8, device=device), prune=2, group=4, scale=math.inf)


@pytest.mark.parametrize("group", [4, 0])
def test_deterministic(group: int, device: str) -> None:
    y, column_scale = torch.randn(515, 700, device=device), torch.rand(700, device=device)
    first = pruned_importance_and_grad(y, column_scale, prune=2, group=group)
    for count in (1, 3, torch.get_num_threads()):
        with with_threads(count):
            again = pruned_importance_and_grad(y, column_scale, prune=2, group=group)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.slow
def test_in_a_compiled_function(device: str) -> None:
    def loss(w: Tensor, r: Tensor) -> Tensor:
        return 2 * pruned_importance((w @ r).tanh(), prune=2, group=4)

    w, r = torch.randn(16, 32, device=device), torch.randn(32, 32, device=device, requires_grad=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(w, r)
    torch.testing.assert_close(compiled, loss(w, r))
    (got,) = torch.autograd.grad(compiled, r)
    (expected,) = torch.autograd.grad(2 * pruned_importance_ref((w @ r).tanh(), prune=2, group=4), r)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [4, 0])
def test_gradcheck(group: int, device: str) -> None:
    y = torch.randn(5, 8, device=device, dtype=torch.float64, requires_grad=True)
    column_scale = torch.rand(8, device=device, dtype=torch.float64, requires_grad=True)

    def loss(y: Tensor, column_scale: Tensor) -> Tensor:
        return pruned_importance(y, column_scale, prune=2, group=group)

    assert torch.autograd.gradcheck(loss, (y, column_scale))


def test_opcheck(device: str) -> None:
    y = torch.randn(5, 8, device=device, requires_grad=True)
    column_scale = torch.rand(8, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.drot.pruned_importance, (y, column_scale), {"prune": 2, "group": 4})
    torch.library.opcheck(torch.ops.drot.pruned_importance, (y, None), {"prune": 2, "group": 0})


def test_refuses_a_second_derivative(device: str) -> None:
    y = torch.randn(5, 8, device=device, requires_grad=True)
    (dy,) = torch.autograd.grad(pruned_importance(y, prune=2, group=4), y, create_graph=True)
    with pytest.raises(NotImplementedError, match="pruned_importance is differentiable once"):
        dy.square().sum().backward()
