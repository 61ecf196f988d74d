"""Products of matrices in 16 bits, which the tensor cores of a GPU add in fp32 and return in fp32.

A CPU has no such product, so the same is computed there from copies in fp32, in which a product of two 16-bit
values is exact.
"""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b [count, i, j] in `dtype`, from a [count, i, k] and b [count, k, j] in the same or a smaller one."""
    if a.dtype == dtype:
        return a @ b
    if a.device.type == "cpu":
        return a.to(dtype) @ b.to(dtype)
    return torch.bmm(a, b, out_dtype=dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Adds alpha · a b to `total` [count, i, j], in place and in its dtype; returns `total`.

    a: [count, i, k] and b: [count, k, j], in the dtype of `total` or a smaller one.
    """
    if total.device.type == "cpu":
        if total.dtype.itemsize == 2:
            return total.copy_(plus_product(total, a, b, alpha=alpha))
        a, b = a.to(total.dtype), b.to(total.dtype)
        # a batch of one is a plain product, whose rounding does not depend on how torch treats batches
        return total.add_((a[0] @ b[0])[None] if len(a) == 1 else a @ b, alpha=alpha)
    if a.dtype == total.dtype:
        return total.baddbmm_(a, b, alpha=alpha)
    return torch.baddbmm(total, a, b, out_dtype=total.dtype, alpha=alpha, out=total)


def identity_plus_product(identity: float, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """identity · 1 + alpha · a b [count, i, i] for 16-bit tensors: the product is rounded before the sum.

    `plus_product` with a matrix in place of the 1 rounds once, but copies that matrix first.
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


def plus_product(c: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """beta · c + alpha · a b [count, i, j] for 16-bit tensors, added in fp32 and rounded once."""
    if c.device.type == "cpu":
        return (beta * c.float() + alpha * (a.float() @ b.float())).to(c.dtype)
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)
