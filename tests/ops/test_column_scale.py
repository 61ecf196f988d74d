"""column_scale and column_scale_backward against fp64, and their gradient in R against autograd."""

import pytest
import torch
from same_bytes import with_threads
from torch import Tensor

from drot.ops import column_scale, column_scale_backward, column_scale_backward_ref, column_scale_ref

SHAPES = [(1, 1, 1), (3, 5, 7), (2, 64, 128), (2, 130, 72), (1, 67, 33), (3, 1, 40)]
HALF_ULP = 2**-8 * (1 + 1e-4)  # of bf16, and of the fp32 arithmetic before it
BF16, FP32 = torch.bfloat16, torch.float32


def drawn(shape: tuple[int, int, int], device: str) -> tuple[Tensor, Tensor]:
    """A product in bf16 and a gradient in fp32; the columns differ in size."""
    count, rows, n = shape
    product = torch.randn(count, rows, n) * 10 ** torch.linspace(-3, 3, n)
    return product.bfloat16().to(device), torch.randn(count, n).to(device)


def threefold(t: Tensor) -> list[Tensor]:
    """t as a transposed view, as every second column, and as a view that is not aligned to 16 bytes."""
    transposed = t.mT.contiguous().mT
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype, device=t.device)
    store = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
    return [transposed, wide[..., ::2].copy_(t), store[1:].view(t.shape).copy_(t)]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 5000, 8)])
def test_values(shape: tuple[int, int, int], inverse: bool, device: str) -> None:
    product, _ = drawn(shape, device)
    q = torch.einsum("kij,kij->kj", product.double(), product.double())
    for scale in (column_scale(product, inverse), column_scale_ref(product, inverse)):
        assert scale.dtype == FP32
        torch.testing.assert_close(scale.double(), 1 / q if inverse else q, rtol=2e-6, atol=0)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_way_back_is_rounded_once(shape: tuple[int, int, int], inverse: bool, device: str) -> None:
    product, gradient = drawn(shape, device)
    value = column_scale(product, inverse)
    d = -gradient.double() * value.double() ** 2 if inverse else gradient.double()
    arguments = product, value, gradient, inverse
    for scaled in (column_scale_backward(*arguments), column_scale_backward_ref(*arguments)):
        assert scaled.dtype == BF16
        torch.testing.assert_close(scaled.double(), product.double() * d[:, None], rtol=HALF_ULP, atol=0)


@pytest.mark.parametrize("inverse", [False, True])
def test_the_gradient_is_that_of_the_rotation(inverse: bool, device: str) -> None:
    """By autograd in fp64, for a loss Σ w_j scale_j² of the scales of U R."""
    u, r = (torch.randn(2, 24, 24, dtype=torch.float64, device=device) for _ in range(2))
    weights = torch.rand(2, 24, dtype=torch.float64, device=device)
    r.requires_grad_()
    q = (u @ r).square().sum(1)
    scale = 1 / q if inverse else q
    (expected,) = torch.autograd.grad((weights * scale.square()).sum(), r)
    product = (u @ r).detach().bfloat16()
    value = column_scale(product, inverse)
    gradient = 2 * weights.float() * value
    found = 2 * u.mT @ column_scale_backward(product, value, gradient, inverse).double()
    assert float((found - expected).norm() / expected.norm()) < 2**-7


def test_a_column_of_zeros(device: str) -> None:
    product, gradient = drawn((2, 9, 16), device)
    product[1, :, 3] = 0
    assert column_scale(product, False)[1, 3] == 0
    inverse = column_scale(product, True)
    assert inverse[1, 3] == torch.inf and inverse.isinf().sum() == 1
    scaled = column_scale_backward(product, inverse, gradient, True)
    assert scaled[1, :, 3].isnan().all() and scaled.isnan().sum() == 9  # 0 · inf, as in torch
    assert not column_scale_backward(product, column_scale(product, False), gradient, False)[1, :, 3].any()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("n", [16, 17])
def test_nan_stays_in_its_column(n: int, inverse: bool, device: str) -> None:
    product, gradient = drawn((2, 70, n), device)
    product[1, 69, 5] = torch.nan
    value = column_scale(product, inverse)
    assert value[1, 5].isnan() and value.isnan().sum() == 1
    scaled = column_scale_backward(product, value, gradient, inverse)
    wanted = torch.zeros_like(scaled, dtype=torch.bool)
    if inverse:
        wanted[1, :, 5] = True
    else:
        wanted[1, 69, 5] = True
    assert torch.equal(scaled.isnan(), wanted)


def test_the_square_of_a_large_scale_does_not_overflow(device: str) -> None:
    product = torch.full((1, 4, 8), 2.0**-42, dtype=BF16, device=device)
    value = column_scale(product, True)
    gradient = torch.full((1, 8), 2.0**-82, dtype=FP32, device=device)
    assert (column_scale_backward(product, value, gradient, True) == -(2.0**40)).all()


def test_nothing(device: str) -> None:
    for shape in ((0, 4, 4), (2, 0, 3), (2, 3, 0)):
        empty = torch.zeros(shape, device=device, dtype=BF16)
        for inverse, value in ((False, 0.0), (True, torch.inf)):
            scale = column_scale(empty, inverse)
            assert scale.shape == (shape[0], shape[2]) and (scale == value).all()
            assert column_scale_backward(empty, scale, scale, inverse).shape == shape


@pytest.mark.parametrize("n", [16, 17])
def test_views(n: int, device: str) -> None:
    product, gradient = drawn((2, 40, n), device)
    value = column_scale(product, True)
    scaled = column_scale_backward(product, value, gradient, True)
    for view in threefold(product):
        torch.testing.assert_close(column_scale(view, True), value, rtol=1e-6, atol=0)
        assert torch.equal(column_scale_backward(view, value, gradient, True), scaled)
    for values, gradients in zip(threefold(value), threefold(gradient), strict=True):
        assert torch.equal(column_scale_backward(product, values, gradient, True), scaled)
        assert torch.equal(column_scale_backward(product, value, gradients, True), scaled)


def test_the_bytes_do_not_depend_on_the_threads(device: str) -> None:
    product, gradient = drawn((3, 190, 300), device)
    found = []
    for count in (1, 2, 3):
        with with_threads(count):
            value = column_scale(product, True)
            found.append((value, column_scale_backward(product, value, gradient, True)))
    for value, scaled in found[1:]:
        assert torch.equal(value, found[0][0]) and torch.equal(scaled, found[0][1])


def test_the_results_have_no_gradient(device: str) -> None:
    product, gradient = (t.requires_grad_() for t in drawn((1, 4, 4), device))
    value = column_scale(product, False)
    assert not value.requires_grad
    assert not column_scale_backward(product, value, gradient, False).requires_grad


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (torch.zeros(2, 2, dtype=BF16), r"product must be \[count, rows, n\], got \[2, 2\]"),
        (torch.zeros(1, 2, 3), "product must be one of BFloat16, got Float"),
    ],
)
def test_wrong_product(product: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        column_scale(product, False)
    with pytest.raises(ValueError, match=message):
        column_scale_backward(product, torch.zeros(1, 3), torch.zeros(1, 3), False)


@pytest.mark.parametrize("name", ["value", "gradient"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(6), r"must be \[2, 3\], one value for each column of product, got \[6\]"),
        (torch.zeros(2, 4), r"must be \[2, 3\], one value for each column of product, got \[2, 4\]"),
        (torch.zeros(1, 3), r"must be \[2, 3\], one value for each column of product, got \[1, 3\]"),
        (torch.zeros(2, 3).double(), "must be one of Float, got Double"),
    ],
)
def test_wrong_vectors(name: str, wrong: Tensor, message: str) -> None:
    vectors = {"value": torch.zeros(2, 3), "gradient": torch.zeros(2, 3), name: wrong}
    with pytest.raises(ValueError, match=f"{name} {message}"):
        column_scale_backward(torch.zeros(2, 5, 3, dtype=BF16), **vectors, inverse=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["value", "gradient"])
def test_vectors_on_the_host(name: str) -> None:
    vectors = {key: torch.zeros(2, 3, device="cuda") for key in ("value", "gradient")} | {
        name: torch.zeros(2, 3)
    }
    with pytest.raises(ValueError, match=f"{name} must be on the device of product, cuda:0, got cpu"):
        column_scale_backward(torch.zeros(2, 5, 3, dtype=BF16, device="cuda"), **vectors, inverse=False)


@pytest.mark.slow
@pytest.mark.parametrize("inverse", [False, True])
def test_torch_accepts_the_ops_and_compiles_them(inverse: bool, device: str) -> None:
    product, gradient = drawn((2, 9, 33), device)
    value = column_scale(product, inverse)
    torch.library.opcheck(torch.ops.drot.column_scale.default, (product, inverse))
    torch.library.opcheck(torch.ops.drot.column_scale_backward.default, (product, value, gradient, inverse))

    def there_and_back(product: Tensor, gradient: Tensor) -> Tensor:
        return 2 * column_scale_backward(product, column_scale(product, inverse), gradient, inverse)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(product, gradient), there_and_back(product, gradient))
