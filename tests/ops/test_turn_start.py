"""turn_start against fp64, and the turn that its results make."""

import math

import pytest
import torch
from torch import Tensor

from drot.ops import turn_start, turn_start_ref

HALF_ULP = 2**-8 * (1 + 1e-4)  # of bf16, and of the fp32 arithmetic before it
ANGLE = (-0.3, 0.07)


def drawn(count: int, n: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(count, n, n).bfloat16().to(device), torch.tensor(ANGLE, device=device)


def exact(j: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    first, second = angle.double()
    return 0.5 * torch.eye(j.shape[-1], device=j.device) + first * j.double(), second * j.double()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 7, 32, 40, 67, 130, 136])
def test_values_are_rounded_once(n: int, count: int, device: str) -> None:
    j, angle = drawn(count, n, device)
    wanted = exact(j, angle)
    for found in (turn_start(j, angle), turn_start_ref(j, angle)):
        for mine, true in zip(found, wanted, strict=True):
            assert mine.dtype == torch.bfloat16
            torch.testing.assert_close(mine.double(), true, rtol=HALF_ULP, atol=1e-7)


@pytest.mark.parametrize("n", [2, 7, 40])
def test_each_matrix_has_its_scale(n: int, device: str) -> None:
    j, angle = drawn(3, n, device)
    store = torch.rand(3, 5, device=device).bfloat16()
    scale = store[:, 2]
    s = scale.double()[:, None, None]
    first, second = angle.double()
    eye = torch.eye(n, device=device, dtype=torch.float64)
    wanted = 0.5 * eye + first * s * j.double(), second * s**2 * j.double()
    for found in (turn_start(j, angle, scale), turn_start_ref(j, angle, scale)):
        for mine, true in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=HALF_ULP, atol=1e-7)


def test_the_two_matrices_make_a_turn(device: str) -> None:
    """By the matrix exponential in fp64, for a j with j² = -1 and an orthogonal q."""
    q, _ = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64))
    basis, _ = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64))
    quarter = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    j = basis @ torch.block_diag(*[quarter] * 12) @ basis.T
    theta = 0.2
    angle = torch.tensor([-math.sin(theta), 1 - math.cos(theta)], device=device)
    results = turn_start(j.bfloat16()[None].to(device), angle)
    change, scaled = (t[0].cpu().double() for t in results)
    turned = q + q @ (change - 0.5 * q.T @ q + j @ scaled)
    assert float((turned - q @ torch.linalg.matrix_exp(-theta * j)).norm() / q.norm()) < 2**-8 * theta


@pytest.mark.parametrize("n", [16, 17])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_where_it_is(bad: float, n: int, device: str) -> None:
    j, angle = drawn(2, n, device)
    j[1, 3, 3] = j[0, n - 1, 0] = bad
    for found in turn_start(j, angle):
        assert torch.equal(found.isfinite(), j.isfinite())
    angle[1] = bad
    change, scaled = turn_start(j, angle)
    assert torch.equal(change.isfinite(), j.isfinite()) and not scaled.isfinite().any()


def test_nothing(device: str) -> None:
    for shape in ((0, 4, 4), (2, 0, 0)):
        empty = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        assert all(t.shape == shape for t in turn_start(empty, torch.zeros(2, device=device)))


@pytest.mark.parametrize("n", [16, 17])
def test_views(n: int, device: str) -> None:
    j, angle = drawn(2, n, device)
    wanted = turn_start(j, angle)
    store = torch.zeros(2 * n * n + 1, device=device, dtype=torch.bfloat16)
    angles = torch.zeros(5, 2, 3, device=device)
    angles[3, :, 1] = angle
    for view, row in (
        (j.mT.contiguous().mT, angle),
        (store[1:].view(j.shape).copy_(j), angle),
        (j, angles[3, :, 1]),
    ):
        found = turn_start(view, row)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(t.is_contiguous() for t in found)


def test_the_results_have_no_gradient(device: str) -> None:
    j, angle = (t.requires_grad_() for t in drawn(1, 4, device))
    assert not any(t.requires_grad for t in turn_start(j, angle))


J = torch.zeros(1, 2, 2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("j", "angle", "message"),
    [
        (J[0], torch.zeros(2), r"j must be \[count, n, n\], got \[2, 2\]"),
        (torch.zeros(1, 2, 3).bfloat16(), torch.zeros(2), r"j must be \[..., n, n\], got \[1, 2, 3\]"),
        (J.float(), torch.zeros(2), "j must be one of BFloat16, got Float"),
        (J, torch.zeros(3), r"angle must be \[2\], the factors of j in change and in scaled, got \[3\]"),
        (J, torch.zeros(1, 2), r"angle must be \[2\].* got \[1, 2\]"),
        (J, torch.zeros(2).double(), "angle must be one of Float, got Double"),
    ],
)
def test_wrong_input(j: Tensor, angle: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turn_start(j, angle)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.zeros(2).bfloat16(), r"scale must be \[1\], a factor for each matrix of j, got \[2\]"),
        (torch.zeros(1, 1).bfloat16(), r"scale must be \[1\].* got \[1, 1\]"),
        (torch.zeros(1), "scale must have the dtype of j"),
    ],
)
def test_wrong_scale(scale: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turn_start(J, torch.zeros(2), scale)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_angle_on_the_host() -> None:
    with pytest.raises(ValueError, match="angle must be on the device of j, cuda:0, got cpu"):
        turn_start(J.cuda(), torch.zeros(2))


@pytest.mark.slow
def test_torch_accepts_the_op_and_compiles_it(device: str) -> None:
    j, angle = drawn(2, 33, device)
    torch.library.opcheck(torch.ops.drot.turn_start.default, (j, angle))

    def both(j: Tensor, angle: Tensor) -> Tensor:
        return 2 * torch.cat(turn_start(j, angle))

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(j, angle), both(j, angle))
