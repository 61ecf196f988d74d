"""sparsegpt_sweep against Optimal Brain Surgeon in fp64.

The reference inverts the Hessian of the remaining columns anew for every column.
"""

import math

import pytest
import torch
from torch import Tensor

from drot.ops import sparsegpt_sweep, sparsegpt_sweep_ref


def problem(rows: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns w [rows, columns], the Hessian in fp64, and Hinv, the upper Cholesky factor of its inverse."""
    x = torch.randn(2 * columns + 3, columns, dtype=torch.float64)
    x = x * torch.logspace(-0.5, 0.5, columns, dtype=torch.float64)
    hessian = x.T @ x / len(x)
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    hinv = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    w = torch.randn(rows, columns, dtype=torch.float64)
    return w.to(device, dtype), hessian.to(device), hinv.to(device, dtype)


def optimal_brain_surgeon(
    w: Tensor, hessian: Tensor, removed: Tensor | None, prune: int, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of sparsegpt_sweep in fp64, from inverses of the Hessian instead of Hinv."""
    w, columns = w.double().clone(), w.shape[1]
    inverse = [torch.linalg.inv(hessian[j:, j:]) for j in range(columns)]  # for columns j and up
    root = torch.stack([inv[0, 0].sqrt() for inv in inverse])
    mask = torch.zeros_like(w, dtype=torch.bool) if removed is None else removed.clone()
    err = torch.zeros_like(w)
    for j in range(columns):
        if removed is None and j % group == 0:
            score = (w[:, j : j + group] / root[j : j + group]) ** 2
            order = score.sort(dim=1, stable=True).indices[:, :prune]
            mask[:, j : j + group].scatter_(1, order, True)
        gone = torch.where(mask[:, j], w[:, j], 0)
        err[:, j] = gone / root[j]
        w[:, j:] -= torch.outer(gone / inverse[j][0, 0], inverse[j][0])
        w[:, j][mask[:, j]] = 0
    return w, err, mask


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-5}


SIZES = [
    (1, 1, 1, 1),
    (33, 24, 2, 4),
    (70, 100, 3, 5),
    (31, 99, 1, 3),
    (130, 128, 4, 8),
    (5, 64, 16, 32),
    (17, 300, 2, 4),  # more columns than one launch of the CUDA kernel sweeps
    (9, 310, 7, 31),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "columns", "prune", "group"), SIZES)
def test_chooses_and_updates(
    rows: int, columns: int, prune: int, group: int, dtype: torch.dtype, device: str
) -> None:
    w, hessian, hinv = problem(rows, columns, dtype, device)
    got = sparsegpt_sweep(w, hinv, None, prune, group)
    # rounding in fp32 may swap nearly equal scores: the values are compared for the same mask
    assert (got[2] == optimal_brain_surgeon(w, hessian, None, prune, group)[2]).double().mean() > 0.999
    expected = optimal_brain_surgeon(w, hessian, got[2], 0, 0)
    assert got[0].dtype == got[1].dtype == dtype
    for value, reference in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(value.double(), reference, **tolerance(dtype))
    assert bool((got[2].reshape(rows, -1, group).sum(-1) == prune).all())
    assert bool((got[0][got[2]] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 17), (64, 128), (129, 100), (10, 290)])
def test_follows_a_given_mask(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    w, hessian, hinv = problem(rows, columns, dtype, device)
    removed = torch.rand(rows, columns, device=device) < 0.5
    got = sparsegpt_sweep(w, hinv, removed, 0, 0)
    expected = optimal_brain_surgeon(w, hessian, removed, 0, 0)
    for value, reference in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(value.double(), reference, **tolerance(dtype))
    assert torch.equal(got[2], removed)


@pytest.mark.parametrize(("prune", "group"), [(2, 4), (1, 3)])
def test_reference_is_optimal_brain_surgeon(prune: int, group: int) -> None:
    w, hessian, hinv = problem(20, 36, torch.float64, "cpu")
    for removed in (None, torch.rand(20, 36) < 0.5):
        got = sparsegpt_sweep_ref(w, hinv, removed, prune, group)
        expected = optimal_brain_surgeon(w, hessian, removed, prune, group)
        torch.testing.assert_close(got[:2], expected[:2], rtol=1e-9, atol=1e-9)
        assert torch.equal(got[2], expected[2])


def test_ties_go_by_position(device: str) -> None:
    w = torch.ones(3, 8, device=device) * torch.tensor([[1.0], [-2.0], [0.0]], device=device)
    removed = sparsegpt_sweep(w, torch.eye(8, device=device), None, 2, 4)[2]
    assert removed.tolist() == [[True, True, False, False] * 2] * 3


def test_strided_input_and_the_lower_triangle(device: str) -> None:
    w, _, hinv = problem(40, 60, torch.float64, device)
    hinv = torch.where(torch.ones_like(hinv).triu().bool(), hinv, math.nan)
    mask = torch.rand(60, 40, device=device).t() < 0.5
    cases = [
        (w[:, 8:48], hinv[8:48, 8:48], mask[:, 8:48]),
        (w.t().contiguous().t(), hinv.t().contiguous().t(), mask),
        (w[::3, ::2], hinv[:30, :30], mask[::3, ::2]),
        (w[:1].expand(40, 60), hinv, mask),
    ]
    for block, block_hinv, removed in cases:
        for given in (None, removed):
            before = block.clone()
            got = sparsegpt_sweep(block, block_hinv, given, 2, 5)
            expected = sparsegpt_sweep_ref(before, block_hinv, given, 2, 5)
            torch.testing.assert_close(got[:2], expected[:2], rtol=1e-9, atol=1e-9)
            assert torch.equal(got[2], expected[2])
            assert torch.equal(block, before)
            assert all(t.is_contiguous() for t in got)


def test_nan_stays_in_its_row(device: str) -> None:
    w, _, hinv = problem(12, 16, torch.float64, device)
    clean = sparsegpt_sweep(w, hinv, None, 2, 4)[0]
    w[5, 3] = math.nan
    got = sparsegpt_sweep(w, hinv, None, 2, 4)[0]
    rest = torch.arange(12, device=device) != 5
    assert torch.equal(got[rest], clean[rest])


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (5, 0), (0, 0)])
@pytest.mark.parametrize("given", [True, False])
def test_empty(rows: int, columns: int, given: bool, device: str) -> None:
    w = torch.empty(rows, columns, device=device)
    removed = torch.empty(rows, columns, dtype=torch.bool, device=device) if given else None
    for out in sparsegpt_sweep(w, torch.empty(columns, columns, device=device), removed, 2, 4):
        assert out.shape == (rows, columns)


W, U, GONE = torch.ones(3, 8), torch.eye(8), torch.zeros(3, 8, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((W[0], U, None, 2, 4), r"w must be \[rows, columns\] or \[batch, rows, columns\], got \[8\]"),
        ((W.bfloat16(), U.bfloat16(), None, 2, 4), "w must be one of Float, Double, got BFloat16"),
        ((W, U[:4], None, 2, 4), r"hinv must be \[8, 8\], .* got \[4, 8\]"),
        ((W[None], U, None, 2, 4), "hinv must be a matrix for each of w, got"),
        ((W[None], U.expand(2, 8, 8), None, 2, 4), r"hinv must be \[8, 8\], .* got \[2, 8, 8\]"),
        ((W, U.double(), None, 2, 4), "hinv must have the dtype of w, Float, got Double"),
        ((W, U, GONE[:2], 2, 4), r"removed must have the shape of w, \[3, 8\], got \[2, 8\]"),
        ((W, U, GONE.float(), 2, 4), "removed must be one of Bool, got Float"),
        ((W, U, None, 2, 0), "group must be 1 to 32 where no mask is given, got 0"),
        ((W, U, None, 2, 3), "group must divide the 8 columns, got 3"),
        ((W, U, None, 5, 4), "prune must be 0 to 4, .* got 5"),
    ],
)
def test_refusals(arguments: tuple, message: str, device: str) -> None:
    moved = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    with pytest.raises(ValueError, match=message):
        sparsegpt_sweep(*moved)


@pytest.mark.slow
def test_opcheck(device: str) -> None:
    w, _, hinv = problem(6, 8, torch.float32, device)
    for removed in (None, torch.rand(6, 8, device=device) < 0.5):
        torch.library.opcheck(torch.ops.drot.sparsegpt_sweep, (w, hinv, removed, 2, 4))


@pytest.mark.slow
def test_in_a_compiled_function(device: str) -> None:
    w, _, hinv = problem(10, 16, torch.float64, device)

    def solve(w: Tensor, hinv: Tensor) -> Tensor:
        pruned, error, removed = sparsegpt_sweep(w * 2, hinv, None, 2, 4)
        return pruned + error.sum() * removed

    got = torch.compile(solve, fullgraph=True, backend="aot_eager")(w, hinv)
    pruned, error, removed = sparsegpt_sweep_ref(w * 2, hinv, None, 2, 4)
    torch.testing.assert_close(got, pruned + error.sum() * removed, rtol=1e-9, atol=1e-9)


def test_refuses_a_gradient(device: str) -> None:
    w, _, hinv = problem(4, 8, torch.float32, device)
    pruned = sparsegpt_sweep(w.requires_grad_(), hinv, None, 2, 4)[0]
    with pytest.raises(NotImplementedError, match="sparsegpt_sweep has no gradient"):
        pruned.sum().backward()


@pytest.mark.parametrize("given", [False, True])
def test_a_batch_is_swept_as_each_matrix(given: bool, device: str) -> None:
    """Also where the matrices of the batch are parts of wider ones."""
    torch.manual_seed(0)
    w, x = torch.randn(3, 37, 48, device=device)[:, :, 8:32], torch.randn(3, 90, 24, device=device)
    hinv = torch.linalg.cholesky(torch.linalg.inv(x.mT @ x), upper=True)
    removed = torch.rand(3, 37, 24, device=device) < 0.5 if given else None
    together = sparsegpt_sweep(w, hinv, removed, 2, 4)
    torch.testing.assert_close(together, sparsegpt_sweep_ref(w, hinv, removed, 2, 4), rtol=1e-4, atol=1e-5)
    for i in range(3):
        alone = sparsegpt_sweep(w[i], hinv[i], None if removed is None else removed[i], 2, 4)
        assert all(torch.equal(a[i], b) for a, b in zip(together, alone, strict=True))
