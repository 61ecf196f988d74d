"""ρ(H + ρI)⁻¹ of ADMM as its penalty grows, against fp64 inverses."""

import pytest
import torch
from together import on_ranks

from drot.calibration import cholesky
from drot.machine.ranks import ALONE, joined
from drot.pruning import shifted_inverse
from drot.pruning.shifted_inverse import ShiftedInverse

GROWTH = (1.3, 1.3, 1.2, 1.2, 1.1, 1.1, 1.1)


def hessian_of(size: int, seed: int = 0) -> torch.Tensor:
    """H with ones on its diagonal, and eigenvalues over five decades, fp64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * size, size, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(0, -2.5, size, dtype=torch.float64)
    x = x @ torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    found = x.T @ x
    scale = found.diagonal().sqrt()
    return found / scale / scale[:, None]


def exact(hessian: torch.Tensor, penalty: float) -> torch.Tensor:
    return penalty * torch.linalg.inv(hessian + penalty * torch.eye(len(hessian), dtype=torch.float64))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_16_bits_stay_as_near_as_a_rounded_inverse():
    """After seven updates the error is below four times that of the exact inverse, rounded to bf16."""
    hessian, penalty = hessian_of(192), 0.3
    found = ShiftedInverse(hessian.float(), torch.tensor(penalty), torch.bfloat16, ALONE)
    for growth in GROWTH:
        found.grow(torch.tensor(growth, dtype=torch.float64))
        penalty *= growth
    wanted = exact(hessian, penalty)
    assert found.matrix.dtype == torch.bfloat16
    rounding = distance(wanted.to(torch.bfloat16), wanted)
    assert distance(found.matrix, wanted) < 4 * rounding < 0.01
    assert distance(exact(hessian, 0.3), wanted) > 50 * rounding  # the updates have changed it


def test_products_of_the_hessians_dtype_take_a_factor_each_time():
    hessian = hessian_of(64)
    found = ShiftedInverse(hessian, torch.tensor(0.3, dtype=torch.float64), torch.float64, ALONE)
    found.grow(torch.tensor(1.2, dtype=torch.float64))
    torch.testing.assert_close(found.matrix, exact(hessian, 0.36), rtol=1e-9, atol=1e-9)


def test_each_matrix_of_a_batch_has_its_own_growth(monkeypatch, device):
    monkeypatch.setattr(shifted_inverse, "ROWS", 24)  # no divisor of 64
    hessians = [hessian_of(64, seed) for seed in range(3)]
    penalty, growth = torch.full((3,), 0.3), torch.tensor([1.1, 1.3, 1.2], dtype=torch.float64)
    batch = torch.stack(hessians).float().to(device)
    found = ShiftedInverse(batch, penalty, torch.bfloat16, ALONE)
    found.grow(growth)
    for matrix, hessian, factor in zip(found.matrix.cpu(), hessians, growth.tolist(), strict=True):
        wanted = exact(hessian, 0.3 * factor)
        assert distance(matrix, wanted) < 2 * distance(wanted.to(torch.bfloat16), wanted)
    assert bool((penalty == 0.3).all())  # the caller's


def test_what_has_no_factor_is_an_error():
    with pytest.raises(torch.linalg.LinAlgError, match="no Cholesky factor"):
        ShiftedInverse(-torch.eye(8), torch.tensor(0.3), torch.float32, ALONE)


def grown_on_ranks(size):
    cholesky.WHOLE = 128  # of this process, which ends with the test
    shifted_inverse.ROWS = 50
    with joined() as ranks:
        found = ShiftedInverse(hessian_of(size).float(), torch.tensor(0.3), torch.bfloat16, ranks)
        before = ranks.sent["rows"]
        for growth in GROWTH:
            found.grow(torch.tensor(growth, dtype=torch.float64))
        return found.matrix, ranks.sent["rows"] - before


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_share_the_updates(count):
    size, penalty = 331, 0.3
    for growth in GROWTH:
        penalty *= growth
    found = on_ranks(count, grown_on_ranks, size)
    wanted = exact(hessian_of(size), penalty)
    rounding = distance(wanted.to(torch.bfloat16), wanted)
    for matrix, sent in found:
        assert torch.equal(matrix, found[0][0])
        assert distance(matrix, wanted) < 4 * rounding
        # the square and the result, in 16 bits
        assert sent == len(GROWTH) * 2 * 2 * size * -(-size // count) * (count - 1)
