"""The Cholesky factor and the inverse, against fp64, and their bytes with several numbers of threads."""

import pytest
import torch
from same_bytes import NUMBERS_OF_THREADS, threads
from together import on_ranks
from torch.utils.flop_counter import FlopCounterMode

from drot.calibration import cholesky
from drot.calibration.cholesky import cholesky_, inverse_of_factor_
from drot.machine.ranks import joined

BLOCK = cholesky.CPU_BLOCK

#: below, at and above a block, with odd sizes and three levels of blocks
SIZES = [1, 5, BLOCK, BLOCK + 1, 2 * BLOCK, 300, 641]


def positive_definite(size, dtype=torch.float32):
    x = torch.randn(2 * size, size, dtype=torch.float64)
    return (x.T @ x / size + 0.1 * torch.eye(size)).to(dtype)


def inverse(matrix):
    matrix = matrix.clone()
    assert cholesky_(matrix)
    inverse_of_factor_(matrix)
    return matrix


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_the_factor_and_the_inverse(size, dtype, tolerance, device):
    matrix = positive_definite(size, dtype).to(device)
    factor = matrix.clone()
    factor.triu_(1).add_(matrix.tril())  # the upper triangle is not read
    assert cholesky_(factor)
    assert torch.equal(factor, factor.tril()) and bool((factor.diagonal() > 0).all())
    exact = matrix.double()
    assert float((factor.double() @ factor.double().T - exact).norm() / exact.norm()) < tolerance
    inverse_of_factor_(factor)
    identity = torch.eye(size, dtype=torch.float64, device=device)
    assert float((factor.double() @ exact - identity).norm() / identity.norm()) < tolerance


def test_a_factor_with_nan_is_none_whatever_the_library_says(monkeypatch):
    """As cuSOLVER's of a singular matrix, on an H200."""
    real = torch.linalg.cholesky_ex

    def without_a_word(matrix, *, out):
        real(matrix, out=out)
        out[0][..., -1, -1] = torch.nan
        out[1].zero_()

    monkeypatch.setattr(torch.linalg, "cholesky_ex", without_a_word)
    matrices = positive_definite(5).repeat(2, 1, 1)
    assert not cholesky_(matrices[0].clone())
    assert cholesky_(matrices).tolist() == [False, False]


@pytest.mark.parametrize("row", [0, BLOCK, 299])
def test_a_matrix_that_is_not_positive_definite(row, device):
    """The row lies in the first, in a middle and in the last block."""
    matrix = positive_definite(300).to(device)
    matrix[row, row] = -1.0
    assert not cholesky_(matrix)


@pytest.mark.parametrize("size", [64, BLOCK, 256, 704])
def test_the_bytes_do_not_depend_on_the_number_of_threads(size):
    """LAPACK's do, for the inverse from 33 columns on and for the factor from 129."""
    matrix = positive_definite(size)
    factors, inverses = [], []
    for count in NUMBERS_OF_THREADS:
        with threads(count):
            factors.append(matrix.clone())
            assert cholesky_(factors[-1])
            inverses.append(inverse(matrix))
    assert all(torch.equal(factor, factors[0]) for factor in factors)
    assert all(torch.equal(inverse, inverses[0]) for inverse in inverses)


def test_an_inverse_takes_the_cube_of_its_size(monkeypatch):
    """n³ operations and a little more; a factor and `torch.cholesky_inverse` take 8/3 n³ on a GPU."""
    monkeypatch.setattr(cholesky, "CPU_BLOCK", 8)
    monkeypatch.setattr(cholesky, "WHOLE", 8)
    matrix, aten = positive_definite(512, torch.float64), torch.ops.aten
    mapping = {
        aten.addmm_: lambda c, a, b, out_shape=None, **_: 2 * a[0] * a[1] * b[1],
        aten.linalg_cholesky_ex: lambda a, *_, out_shape=None, **__: a[-1] ** 3 / 3,
        # a triangular matrix against the columns of another
        aten.linalg_solve_triangular: lambda a, b, *_, out_shape=None, **__: a[-1] * b[0] * b[1],
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        found = inverse(matrix)
    assert 0.95 * 512**3 < counter.get_total_flops() < 1.1 * 512**3
    torch.testing.assert_close(found @ matrix, torch.eye(512, dtype=torch.float64), rtol=0, atol=1e-9)


def shared(size):
    cholesky.WHOLE = BLOCK  # of this process, which ends with the test
    matrix = positive_definite(size)
    with joined() as ranks:
        factor, found = matrix.clone(), matrix.clone()
        assert cholesky_(factor, ranks) and cholesky_(found, ranks)
        inverse_of_factor_(found, ranks)
        broken = matrix.clone()
        broken[size - 2, size - 2] = -1
        return matrix, factor, found, cholesky_(broken, ranks), ranks.sent["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_share_a_factor_and_an_inverse(count):
    found = on_ranks(count, shared, 641)
    matrix, factor, inverted, broken, sent = found[0]
    exact = matrix.double()
    assert not broken and sent > 0
    assert torch.equal(factor, factor.tril())
    assert float((factor.double() @ factor.double().T - exact).norm() / exact.norm()) < 1e-5
    assert torch.equal(inverted, inverted.T)
    identity = torch.eye(641, dtype=torch.float64)
    assert float((inverted.double() @ exact - identity).norm() / identity.norm()) < 1e-4
    for other in found[1:]:
        assert torch.equal(other[1], factor) and torch.equal(other[2], inverted)
