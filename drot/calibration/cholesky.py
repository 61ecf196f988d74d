"""Cholesky factor and inverse of a symmetric matrix, or of each of a batch of matrices, in place.

LAPACK divides a matrix among the threads, so the bytes of its factor and of its inverse depend on the number
of threads. These functions halve the matrix down to blocks that LAPACK does not divide. Everything else is
matrix products and triangular solves. With MKL their bytes are the same for all numbers of threads, except
for some products whose sizes are no multiples of 64 (docs/repeat.md, *After a crash*).

A factor and the inverse from it take n³ operations for large n, and memory for a quarter of the matrix;
`torch.cholesky_inverse` takes 7/3 n³ on a GPU, and two further copies of the matrix.

Instructions for a matrix of 512 columns, counted by valgrind (AVX2): the factor takes 24 million, LAPACK's
11 million; factor and inverse take 69 million, LAPACK's 76 million.
"""

import torch
from torch import Tensor

from drot.machine.devices import is_gpu
from drot.machine.products import add_product

#: columns of a block that is not halved, on a CPU and on a GPU. LAPACK does not divide the CPU's among
#: threads (MKL divides 192 columns). Smaller products would leave most of a GPU idle.
CPU_BLOCK, GPU_BLOCK = 128, 2048
#: columns up to which a product with a triangle, or for one, is a product of whole matrices; at least a block
WHOLE = 2048


def cholesky_(matrix: Tensor) -> Tensor:
    """Replaces symmetric matrices [..., n, n], fp32 or fp64, by their Cholesky factors L, lower triangular.

    Only the lower triangles are read. Returns whether each is positive definite, bool [...]; the content of
    the others is undefined.
    """
    if matrix.shape[-1] <= _block(matrix):
        info = torch.empty(matrix.shape[:-2], dtype=torch.int32, device=matrix.device)
        torch.linalg.cholesky_ex(matrix, out=(matrix, info))
        return info == 0
    top, left, bottom, right = _quarters(matrix)
    found = cholesky_(top)
    if not found.any():
        return found
    left.copy_(torch.linalg.solve_triangular(top.mT, left, upper=True, left=False))
    _add_gram_(bottom, left.mT, alpha=-1)
    right.zero_()
    return found & cholesky_(bottom)


def inverse_of_factor_(lower: Tensor) -> None:
    """Replaces the Cholesky factors L [..., n, n] of matrices by their inverses, (L Lᵀ)⁻¹ = L⁻ᵀ L⁻¹."""
    invert_lower_(lower)
    _gram_(lower)


def _block(matrix: Tensor) -> int:
    return GPU_BLOCK if is_gpu(matrix.device) else CPU_BLOCK


def _quarters(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the upper left, lower left, lower right and upper right part, cut at a multiple of a block."""
    block = _block(matrix)
    cut = (matrix.shape[-1] // 2 + block - 1) // block * block
    top, bottom = matrix[..., :cut, :], matrix[..., cut:, :]
    return top[..., :cut], bottom[..., :cut], bottom[..., cut:], top[..., cut:]


def invert_lower_(lower: Tensor) -> None:
    """Replaces lower triangular matrices L [..., n, n], fp32 or fp64, with 0 above the diagonal, by L⁻¹."""
    if lower.shape[-1] <= _block(lower):
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False))
        return
    top, left, bottom, _ = _quarters(lower)
    invert_lower_(top)
    invert_lower_(bottom)
    _multiply_(bottom, left)
    _multiply_(top, left.mT, transposed=True)
    left.neg_()


def _gram_(lower: Tensor) -> None:
    """L ← Lᵀ L."""
    if lower.shape[-1] <= _block(lower):
        lower.copy_(lower.mT @ lower)
        return
    top, left, bottom, right = _quarters(lower)
    _gram_(top)
    _add_gram_(top, left)
    _multiply_(bottom, left, transposed=True)
    right.copy_(left.mT)
    _gram_(bottom)


def _multiply_(lower: Tensor, matrix: Tensor, *, transposed: bool = False) -> None:
    """matrix ← L matrix, or Lᵀ matrix, for L [..., n, n] lower triangular and matrix [..., n, any width]."""
    if lower.shape[-1] <= WHOLE:
        matrix.copy_((lower.mT if transposed else lower) @ matrix)
        return
    top, left, bottom, _ = _quarters(lower)
    first, second = matrix.tensor_split([top.shape[-1]], -2)
    if transposed:
        _multiply_(top, first, transposed=True)
        add_product(first, left.mT, second)
        _multiply_(bottom, second, transposed=True)
    else:
        _multiply_(bottom, second)
        add_product(second, left, first)
        _multiply_(top, first)


def _add_gram_(symmetric: Tensor, a: Tensor, alpha: float = 1.0) -> None:
    """symmetric [..., n, n] += alpha · aᵀ a for a [..., any length, n].

    Above WHOLE columns the upper quarter is a copy of the lower one.
    """
    if symmetric.shape[-1] <= WHOLE:
        add_product(symmetric, a.mT, a, alpha)
        return
    top, left, bottom, right = _quarters(symmetric)
    before, after = a.tensor_split([top.shape[-1]], -1)
    _add_gram_(top, before, alpha)
    _add_gram_(bottom, after, alpha)
    add_product(left, after.mT, before, alpha)
    right.copy_(left.mT)
