"""skew_momentum against fp64: the moments in so(n), and Nesterov's sum or Adam's ratio, in one pass."""

import pytest
import torch
from torch import Tensor

from drot.ops import skew_momentum, skew_momentum_ref

ZEROS = torch.zeros(2, 2, dtype=torch.bfloat16)
SHAPES = [(1, 1), (5, 5), (32, 32), (33, 33), (3, 64, 64), (2, 2, 45, 45), (1, 130, 130)]


def case(shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    product, momentum = torch.randn(2, *shape).bfloat16().to(device)
    return product, momentum.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("decay", [0.0, 0.9, -0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: tuple[int, ...], decay: float, device: str) -> None:
    product, momentum = case(shape, device)
    before, reference = momentum.clone(), momentum.clone()
    above = torch.ones(shape, dtype=torch.bool, device=device).triu(1)
    s = product.double() - product.double().mT
    upper = before.double().triu(1)
    expected = decay * (upper - upper.mT) + s
    u = skew_momentum(product, momentum, decay)
    assert u.dtype == torch.bfloat16
    torch.testing.assert_close(momentum.double()[above], expected[above], rtol=2**-8, atol=1e-6)
    assert torch.equal(momentum[~above], before[~above])
    torch.testing.assert_close(u.double(), s + decay * expected, rtol=2**-8, atol=1e-6)
    by_torch = skew_momentum_ref(product, reference, decay)
    torch.testing.assert_close(reference.float(), momentum.float(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(by_torch.float(), u.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_adams_ratio(shape: tuple[int, ...], device: str) -> None:
    product, momentum = case(shape, device)
    momentum = torch.where(torch.ones_like(momentum, dtype=torch.bool).tril(-1), momentum.abs(), momentum)
    before, reference = momentum.clone(), momentum.clone()
    s = product.double() - product.double().mT
    m, v = 0.9 * before.double().triu(1) + s.triu(1), 0.95 * before.double().mT.triu(1) + s.square().triu(1)
    ratio = torch.where(v > 0, m / v.sqrt(), 0)
    u = skew_momentum(product, momentum, 0.9, 0.95)
    tolerance = dict(rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(momentum.double().triu(1), m, **tolerance)
    torch.testing.assert_close(momentum.double().mT.triu(1), v, **tolerance)
    assert torch.equal(momentum.diagonal(dim1=-2, dim2=-1), before.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(u.double(), ratio - ratio.mT, **tolerance)
    by_torch = skew_momentum_ref(product, reference, 0.9, 0.95)
    torch.testing.assert_close(reference.float(), momentum.float(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(by_torch.float(), u.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e-18, 1.0, 1e18])
def test_adams_ratio_has_a_bound_at_every_scale(scale: float, device: str) -> None:
    """|m|/√v is at most (Σ (0.9²/0.95)^k)^½ = 2.6, also where squares underflow: there it is 0 or small."""
    momentum = torch.zeros(1, 40, 40, device=device, dtype=torch.bfloat16)
    for _ in range(30):
        u = skew_momentum((scale * torch.randn(1, 40, 40)).bfloat16().to(device), momentum, 0.9, 0.95)
        assert u.abs().max() < 2.7


def test_many_steps_stay_skew_symmetric(device: str) -> None:
    momentum = torch.zeros(2, 70, 70, device=device, dtype=torch.bfloat16)
    for _ in range(20):
        u = skew_momentum(torch.randn(2, 70, 70).bfloat16().to(device), momentum, 0.9)
        assert torch.equal(u, -u.mT)
    assert momentum.tril().count_nonzero() == 0


def test_many_steps_add_little_rounding(device: str) -> None:
    momentum = torch.zeros(1, 64, 64, device=device, dtype=torch.bfloat16)
    exact = torch.zeros(64, 64, dtype=torch.float64)
    for _ in range(60):
        product = torch.randn(64, 64).bfloat16()
        exact = 0.9 * exact + product.double() - product.double().mT
        skew_momentum(product[None].to(device), momentum, 0.9)
    error = (momentum[0].cpu().double() - exact).triu(1).norm() / exact.triu(1).norm()
    # each step rounds by at most 2^-8, in a direction of its own, and 0.9^k of that is left after k steps
    assert error < 2**-8 / (1 - 0.9**2) ** 0.5


def test_a_product_that_is_not_contiguous(device: str) -> None:
    product, momentum = case((3, 40, 40), device)
    other = momentum.clone()
    u = skew_momentum(product.mT, momentum, 0.9)
    assert torch.equal(u, skew_momentum(product.mT.contiguous(), other, 0.9))
    assert torch.equal(momentum, other)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4, 4)])
def test_nothing(shape: tuple[int, ...], device: str) -> None:
    assert skew_momentum(*case(shape, device), 0.9).shape == shape


@pytest.mark.parametrize(
    ("product", "momentum", "decay", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), 0.9, r"product must be \[..., n, n\], got \[2, 3\]"),
        (torch.zeros(4), torch.zeros(4), 0.9, r"product must be \[..., n, n\], got \[4\]"),
        (torch.zeros(2, 2), torch.zeros(2, 2), 0.9, "product must be one of BFloat16, got Float"),
        (ZEROS, torch.zeros(3, 3), 0.9, "momentum must have the shape of product"),
        (ZEROS, ZEROS.half(), 0.9, "momentum must have the dtype of product"),
        (ZEROS, ZEROS[:, :1].expand(2, 2), 0.9, "must be contiguous"),
        (ZEROS, ZEROS, float("inf"), "decay must be finite, got inf"),
        (ZEROS, ZEROS, (0.9, 1.5), "square_decay must be between 0 and 1, got 1.5"),
        (ZEROS, ZEROS, (0.9, float("nan")), "square_decay must be between 0 and 1, got nan"),
    ],
)
def test_wrong_input(
    product: Tensor, momentum: Tensor, decay: float | tuple[float, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        skew_momentum(product, momentum, *(decay if isinstance(decay, tuple) else (decay,)))


@pytest.mark.slow
def test_torch_accepts_the_op_and_compiles_it(device: str) -> None:
    product, momentum = case((2, 33, 33), device)
    for decays in ((0.9,), (0.9, 0.95)):
        torch.library.opcheck(torch.ops.drot.skew_momentum.default, (product, momentum.abs(), *decays))
    compiled = torch.compile(lambda p, m: 2 * skew_momentum(p, m, 0.9), fullgraph=True, backend="aot_eager")
    mine, theirs = momentum.clone(), momentum.clone()
    assert torch.equal(compiled(product, mine), 2 * skew_momentum(product, theirs, 0.9))
    assert torch.equal(mine, theirs)
