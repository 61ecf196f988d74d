"""Cholesky factor and inverse of a symmetric matrix, in place.

LAPACK divides a matrix among the threads, so the bytes of its factor and of its inverse depend on the number
of threads. On a CPU these functions halve the matrix down to blocks that LAPACK does not divide. Everything
else is matrix products and triangular solves. With MKL their bytes are the same for all numbers of threads,
except for some products whose sizes are no multiples of 64 (docs/repeat.md, *After a crash*).

Instructions for a matrix of 512 columns, counted by valgrind (AVX2): the factor takes 24 million, LAPACK's
11 million; factor and inverse take 69 million, LAPACK's 76 million.
"""

import torch
from torch import Tensor

#: columns of a block, which LAPACK does not divide among threads; MKL divides 192 columns
BLOCK = 128


def cholesky_(matrix: Tensor) -> bool:
    """Replaces a symmetric matrix [n, n], fp32 or fp64, by its Cholesky factor L, lower triangular.

    Only the lower triangle is read. Returns False, with undefined content, if it is not positive definite.
    """
    size = matrix.shape[0]
    if size <= BLOCK or matrix.is_cuda:
        info = torch.empty((), dtype=torch.int32, device=matrix.device)
        torch.linalg.cholesky_ex(matrix, out=(matrix, info))
        return int(info) == 0
    top, left, bottom, right = _quarters(matrix)
    if not cholesky_(top):
        return False
    left.copy_(torch.linalg.solve_triangular(top.T, left, upper=True, left=False))
    bottom.addmm_(left, left.T, alpha=-1)
    right.zero_()
    return cholesky_(bottom)


def inverse_of_factor_(lower: Tensor) -> None:
    """Replaces the Cholesky factor L [n, n] of a matrix by the inverse of the matrix, (L Lᵀ)⁻¹ = L⁻ᵀ L⁻¹."""
    if lower.is_cuda:
        torch.cholesky_inverse(lower, out=lower)
        return
    invert_lower_(lower)
    _gram_(lower)


def _quarters(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the upper left, lower left, lower right and upper right part, cut at a multiple of BLOCK."""
    cut = (matrix.shape[0] // 2 + BLOCK - 1) // BLOCK * BLOCK
    return matrix[:cut, :cut], matrix[cut:, :cut], matrix[cut:, cut:], matrix[:cut, cut:]


def invert_lower_(lower: Tensor) -> None:
    """Replaces a lower triangular matrix L [n, n], fp32 or fp64, with 0 above the diagonal, by L⁻¹.

    It takes 2/3 n³ operations; a triangular solve for the identity takes n³ and the memory of the identity.
    """
    size = lower.shape[0]
    if size <= BLOCK:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    top, left, bottom, _ = _quarters(lower)
    invert_lower_(top)
    invert_lower_(bottom)
    left.copy_((bottom @ left @ top).neg_())


def _gram_(lower: Tensor) -> None:
    """L ← Lᵀ L."""
    if lower.shape[0] <= BLOCK:
        lower.copy_(lower.T @ lower)
        return
    top, left, bottom, right = _quarters(lower)
    before = left.clone()
    left.copy_(bottom.T @ before)
    right.copy_(left.T)
    _gram_(top)
    top.addmm_(before.T, before)
    _gram_(bottom)
