"""Products of 16-bit matrices whose sums are in fp32.

The tensor cores of a GPU compute them. A CPU computes them from copies in fp32, in which the product of two
16-bit values is exact.
"""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b [count, i, j] in `dtype`.

    a: [count, i, k] and b: [count, k, j], both in `dtype` or both in one smaller dtype.
    """
    if a.dtype == dtype:
        return a @ b
    if a.device.type == "cpu":
        return a.to(dtype) @ b.to(dtype)
    return torch.bmm(a, b, out_dtype=dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Adds alpha · a b to `total`, in place and in its dtype; returns `total`.

    total: [i, j], or [count, i, j] for a batch of matrices.
    a: [i, k] or [count, i, k], in the dtype of `total` or a smaller one.
    b: [k, j] or [count, k, j], in the dtype of `a`.
    """
    batch = total.dim() == 3
    if total.device.type == "cpu":
        if total.dtype.itemsize == 2:
            return total.copy_(total.float() + alpha * (a.float() @ b.float()))
        a, b = a.to(total.dtype), b.to(total.dtype)
        if batch:  # a batch of one is a plain product, whose rounding does not depend on torch's batches
            return total.add_((a[0] @ b[0])[None] if len(a) == 1 else a @ b, alpha=alpha)
    if a.dtype == total.dtype:
        return total.baddbmm_(a, b, alpha=alpha) if batch else total.addmm_(a, b, alpha=alpha)
    add = torch.baddbmm if batch else torch.addmm
    return add(total, a, b, out_dtype=total.dtype, alpha=alpha, out=total)


def identity_plus_product(identity: float, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """identity · 1 + alpha · a b [count, i, i] for 16-bit tensors: the product is rounded before the sum.

    torch's product with a sum rounds once, but copies the matrix of the sum first.
    """
    if a.device.type == "cpu":
        result = (alpha * (a.float() @ b.float())).to(a.dtype)
    else:
        result = torch.empty_like(a)
        result.baddbmm_(a, b, beta=0, alpha=alpha)  # with beta = 0 what `result` held is not read
    return add_identity(result, identity)


def add_identity(total: Tensor, factor: float | Tensor) -> Tensor:
    """Adds factor · 1 to `total` [count, i, i], in place; returns `total`."""
    total.diagonal(dim1=-2, dim2=-1).add_(factor)
    return total
