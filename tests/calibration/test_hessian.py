"""Hessians, their factors and tr(W H Wᵀ), against fp64, with the number of their products."""

import pytest
import torch
from counted_flops import counted_flops
from same_bytes import NUMBERS_OF_THREADS, threads

from drot.calibration import hessian as hessians
from drot.calibration.hessian import HessianAccumulator, InputHessian, damping_unit, energy, factorize
from drot.core.errors import UserError

WIDTH = 16
#: below, at and above a panel, and with several panels
SIZES = [1, 5, WIDTH, WIDTH + 1, 3 * WIDTH, 75]


@pytest.fixture
def narrow_panels(monkeypatch):
    monkeypatch.setattr(hessians, "PANEL_COLUMNS", {"cpu": WIDTH, "cuda": WIDTH})


def accumulated(batches, size, device):
    accumulator = HessianAccumulator(size, device)
    for x in batches:
        accumulator.add(x.to(device))
    return accumulator.hessian(6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_the_hessian_of_all_batches(size, dtype, device, narrow_panels):
    batches = [
        torch.randn(3, 7, size).to(dtype),
        torch.randn(2, 7, size).to(dtype),
        torch.randn(9, size).to(dtype),
    ]
    found = accumulated(batches, size, device)
    rows = torch.cat([x.reshape(-1, size) for x in batches]).double()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), 2 / 6 * rows.T @ rows, rtol=1e-5, atol=1e-5)
    for start in range(0, size, WIDTH):  # mirrored, so the bytes are the same
        assert torch.equal(found[:start, start : start + WIDTH], found[start : start + WIDTH, :start].T)


def test_the_products_of_a_hessian_are_half(narrow_panels):
    """Of k by k blocks, the k (k + 1) / 2 on or below the diagonal."""
    x, blocks = torch.randn(2, 10, 4 * WIDTH), 4
    flops = counted_flops(lambda: accumulated([x], 4 * WIDTH, "cpu"))
    assert flops == blocks * (blocks + 1) // 2 * (2 * 20 * WIDTH * WIDTH)


def test_the_products_of_real_sizes_are_near_half():
    """The share of the whole products, from the width of the panels."""
    for device, size, most in (("cpu", 4096, 0.54), ("cuda", 14336, 0.58), ("cuda", 28672, 0.54)):
        panels = hessians.lower_panels(size, torch.device(device))
        area = sum((rows.stop - rows.start) * columns.stop for rows, columns in panels)
        assert 0.5 <= area / size**2 < most


def test_the_bytes_of_a_hessian_do_not_depend_on_the_number_of_threads():
    x, found = torch.randn(4, 64, 704), []
    for count in NUMBERS_OF_THREADS:
        with threads(count):
            found.append(accumulated([x, x], 704, "cpu"))
    assert all(torch.equal(matrix, found[0]) for matrix in found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_energy(size, dtype, tolerance, device, narrow_panels):
    x, weight = torch.randn(40, size, dtype=torch.float64), torch.randn(9, size, dtype=torch.float64)
    found = energy(weight.to(device, torch.bfloat16), (x.T @ x).to(device, dtype))
    expected = float((x @ weight.bfloat16().double().T).square().sum())
    assert found == pytest.approx(expected, rel=tolerance)


def test_the_products_of_energy_are_half(narrow_panels):
    weight, matrix = torch.randn(9, 4 * WIDTH), torch.eye(4 * WIDTH)
    assert counted_flops(lambda: energy(weight, matrix)) == 10 * (2 * 9 * WIDTH * WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_factor_of_a_hessian_with_dead_columns(dtype, device):
    x = torch.randn(100, 40, dtype=torch.float64)
    x[:, [3, 17]] = 0
    matrix = (x.T @ x).to(device, dtype)
    before = matrix.clone()
    factor = factorize(matrix, 0.02)
    assert torch.equal(matrix, before)
    assert factor.dead_columns.nonzero()[:, 0].tolist() == [3, 17]
    fixed = x.T @ x
    fixed[[3, 17], [3, 17]] = 1
    assert float(factor.unit) == pytest.approx(float(fixed.diagonal().mean()), rel=1e-5)
    inverse = torch.linalg.inv(fixed + 0.02 * fixed.diagonal().mean() * torch.eye(40))
    hinv = factor.hinv.cpu().double()
    assert factor.hinv.dtype == dtype and bool((hinv.tril(-1) == 0).all())
    torch.testing.assert_close(hinv.T @ hinv, inverse, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(
        factor.inverse_diagonal.cpu().double(), inverse.diagonal(), rtol=1e-4, atol=1e-8
    )


def test_units_of_the_damping():
    """A few very large columns move the mean and not the median. Dead columns count as 1 in the mean, and not
    at all in the median."""
    diagonal = torch.tensor([0.0, 2.0, 3.0, 4.0, 1e6, 0.0, 0.0])
    assert float(damping_unit(diagonal, "mean")) == pytest.approx((3 + 2 + 3 + 4 + 1e6) / 7)
    assert float(damping_unit(diagonal, "median")) == 3.0
    assert float(damping_unit(torch.zeros(4), "median")) == 1.0


def test_a_factor_damped_by_the_median():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    inputs[:, 3] *= 1000
    matrix = inputs.T @ inputs
    factor = factorize(matrix, 0.5, "median")
    added = 0.5 * matrix.diagonal().sort().values[7] * torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(factor.hinv.T @ factor.hinv, torch.linalg.inv(matrix + added))


def test_a_damping_by_the_median_rises_to_one_mean():
    """One column is all of the mean. A damping of 1 median leaves the eigenvalue at -5 below 0."""
    matrix = torch.diag(torch.tensor([1e4] + [1.0] * 15, dtype=torch.float64))
    matrix[1, 2] = matrix[2, 1] = 6.0
    factor = factorize(matrix, 1.0, "median")
    assert factor.damping == 10
    matrix[1, 2] = matrix[2, 1] = 1e4  # -9999, and the mean is 625.9
    with pytest.raises(UserError, match=r"damping of 625\.9"):
        factorize(matrix, 1.0, "median")


def test_the_factor_is_computed_once(monkeypatch):
    calls = []
    real = hessians.factorize
    monkeypatch.setattr(hessians, "factorize", lambda *args: calls.append(args) or real(*args))
    of_input = InputHessian(torch.eye(4), 0.01)
    assert not calls
    assert of_input.factor is of_input.factor and len(calls) == 1
    with pytest.raises(UserError, match="hessian must be finite"):
        _ = InputHessian(torch.full((2, 2), torch.nan), 0.01).factor


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_a_matrix_is_reversed_in_place(size, monkeypatch):
    monkeypatch.setattr(hessians, "REVERSED", 3)  # no divisor of half the numbers
    matrix = torch.randn(2, size, size)
    expected = matrix.flip(-2, -1)
    hessians._reverse_(matrix)
    assert torch.equal(matrix, expected)


def test_the_layout_of_a_hessian_does_not_change_its_factor():
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    matrix = x.T @ x
    assert not matrix.mT.is_contiguous()
    torch.testing.assert_close(factorize(matrix.mT, 0.01).hinv, factorize(matrix, 0.01).hinv)
