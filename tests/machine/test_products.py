"""Products of 16-bit and fp32 matrices, against fp64."""

import pytest
import torch

from drot.machine.products import add_product, product


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
