"""Products of 16-bit matrices whose sums are in fp32, and the precision of the products of fp32 matrices.

The tensor cores of a GPU compute the former. A CPU computes them from copies in fp32, in which the product of
two 16-bit values is exact.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from drot.machine.devices import is_gpu

#: compute capabilities of the GPUs whose fp64 is half as fast as their fp32; others have 1/32 or less
FAST_FP64 = {(8, 0), (9, 0), (10, 0)}


def merging_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which rotations are merged on `device`: fp64, or fp32 on a GPU whose fp64 is slow."""
    if is_gpu(device) and torch.get_device_module(device).get_device_capability(device) not in FAST_FP64:
        return torch.float32
    return torch.float64


@contextlib.contextmanager
def fp32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """A context, or a decorator, that sets how a GPU computes products of fp32 matrices, and sets it back.

    `tf32` rounds the factors to 10 bits of mantissa, `ieee` does not. The caller may have chosen otherwise,
    as containers do with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, from which torch takes no more than its first
    setting. The setting holds for all threads. Products on a CPU do not change.
    """
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, precision
    try:
        yield
    finally:
        products.fp32_precision = before


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """A context, or a decorator, in which a `torch.autocast` of the caller casts nothing.

    It would round the rotations and the statistics to 16 bits.
    """
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


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


def rounded_once(a: Tensor, b: Tensor) -> Tensor:
    """a b [i, j] in the dtype of a [i, k], rounded once from fp32 at least; b [k, j] in any float dtype."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide or a.device.type == "cpu":
        return (a.to(wide) @ b.to(wide)).to(a.dtype)
    return two_term_product(a, b).to(a.dtype)


def two_term_product(a: Tensor, b: Tensor) -> Tensor:
    """a b [i, j] in fp32 for a 16-bit a [i, k], from two 16-bit terms of b [k, j], on tensor cores.

    The terms hold 16 bits of b's mantissa in bf16, and more in fp16.
    """
    high = b.to(a.dtype)
    total = torch.zeros(len(a), b.shape[1], dtype=torch.float32, device=a.device)
    add_product(total, a, high)
    return add_product(total, a, (b - high.to(b.dtype)).to(a.dtype))


def identity_plus_product(identity: float, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """identity · 1 + alpha · a b [count, i, i] for 16-bit tensors: the product is rounded before the sum.

    torch's product with a sum rounds once, but copies the matrix of the sum first.
    """
    if a.device.type == "cpu":
        result = (alpha * (a.float() @ b.float())).to(a.dtype)
    else:
        result = torch.empty_like(a)
        result.baddbmm_(a, b, beta=0, alpha=alpha)  # with beta = 0 what `result` held is not read
    result.diagonal(dim1=-2, dim2=-1).add_(identity)
    return result
