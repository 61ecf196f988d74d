"""Products of 16-bit and fp32 matrices, against fp64, and the precision of the latter."""

import os
import subprocess
import sys

import pytest
import torch

from drot.machine.products import add_product, fp32_products, product, rounded_once, two_term_product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [None, 1, 3])
def test_a_product_is_added_in_fp32(count, dtype, device):
    """Sums in 16 bits would be off by 1e-2: each entry is the sum of 300 products."""
    batch = [] if count is None else [count]
    total, a, b = torch.randn(*batch, 5, 7), torch.randn(*batch, 5, 300), torch.randn(*batch, 300, 7)
    a, b = a.to(dtype), b.to(dtype)
    expected = total.double() + 0.5 * (a.double() @ b.double())
    total = total.to(device)
    a, b = a.to(device), b.to(device)
    assert add_product(total, a, b, alpha=0.5) is total
    torch.testing.assert_close(total.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    if count is not None:
        found = product(a, b, torch.float32).cpu().double()
        torch.testing.assert_close(found, a.cpu().double() @ b.cpu().double(), rtol=1e-5, atol=1e-4)


@pytest.fixture
def products():
    """torch's setting for products of fp32 matrices, which the test may change."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    yield products
    products.fp32_precision = before


@pytest.mark.parametrize("before", ["tf32", "ieee"])
def test_the_callers_precision_comes_back(products, before):
    products.fp32_precision = before
    with fp32_products("ieee"):
        with fp32_products("tf32"):
            assert products.fp32_precision == "tf32"
        assert products.fp32_precision == "ieee"
    assert products.fp32_precision == before
    with pytest.raises(ZeroDivisionError), fp32_products("tf32" if before == "ieee" else "ieee"):
        _ = 1 / 0
    assert products.fp32_precision == before
    assert before == "tf32" or not products.allow_tf32  # the older setting is the caller's again, too


@pytest.mark.slow
def test_the_precision_is_set_where_a_container_asks_for_tf32():
    """In a new process, since torch reads the variable once. Without it, torch begins with that of fp32."""
    ask = (
        "import torch\n"
        "from drot.machine.products import fp32_products\n"
        "with fp32_products('ieee'): print(torch.backends.cuda.matmul.fp32_precision)\n"
        "print(torch.backends.cuda.matmul.allow_tf32)"  # the older setting is the caller's again, too
    )
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", ask], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["ieee", "True"], done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rotation_in_two_terms_is_as_exact_as_the_states(dtype, device):
    """The error is a hundredth of what rounding the states to 16 bits costs; with one term it is as large."""
    a = torch.randn(64, 256).to(dtype).to(device)
    b = torch.linalg.qr(torch.randn(256, 256, dtype=torch.float64))[0].to(device)
    exact = a.double() @ b
    rounding = float((exact.to(dtype).double() - exact).norm())
    error = float((two_term_product(a, b).double() - exact).norm())
    assert error < rounding / 100 < rounding / 2 < float((a.double() @ b.to(dtype).double() - exact).norm())
    found = rounded_once(a, b)
    assert found.dtype == dtype and float((found.double() - exact).norm()) < 1.01 * rounding


def test_a_product_of_wide_values_is_that_of_torch(device):
    a, b = torch.randn(8, 32, device=device), torch.randn(32, 32, dtype=torch.float64, device=device)
    assert torch.equal(rounded_once(a, b), a @ b.float())
    assert torch.equal(rounded_once(a.double(), b), a.double() @ b)
