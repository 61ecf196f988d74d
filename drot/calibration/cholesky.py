"""Cholesky factor and inverse of a symmetric matrix, or of each of a batch of matrices, in place.

LAPACK divides a matrix among the threads, so the bytes of its factor and of its inverse depend on the number
of threads. These functions halve the matrix down to blocks that LAPACK does not divide. Everything else is
matrix products and triangular solves. With MKL their bytes are the same for all numbers of threads, except
for some products whose sizes are no multiples of 64 (docs/repeat.md, *After a crash*).

A factor and the inverse from it take n³ operations for large n, and memory for a quarter of the matrix;
`torch.cholesky_inverse` takes 7/3 n³ on a GPU, and two further copies of the matrix.

Several ranks that have the same matrix share its products and triangular solves, each for the rows or the
columns of its own, and gather each result. All ranks compute the blocks that are not halved.

Instructions for a matrix of 512 columns, counted by valgrind (AVX2): the factor takes 24 million, LAPACK's
11 million; factor and inverse take 69 million, LAPACK's 76 million.
"""

import itertools

import torch
from torch import Tensor

from drot.machine.devices import is_gpu
from drot.machine.products import add_product
from drot.machine.ranks import ALONE, Ranks

#: columns of a block that is not halved, on a CPU and on a GPU. LAPACK does not divide the CPU's among
#: threads (MKL divides 192 columns). Smaller products would leave most of a GPU idle.
CPU_BLOCK, GPU_BLOCK = 128, 2048
#: columns up to which a product with a triangle, or for one, is a product of whole matrices, and up to which
#: ranks do not share a matrix; at least a block
WHOLE = 2048
#: columns up to which a GPU factors a batch of blocks at once, for which cuSOLVER has a kernel of its own
MOST_IN_BATCH = 512


def cholesky_(matrix: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """Replaces symmetric matrices [..., n, n], fp32 or fp64, by their Cholesky factors L, lower triangular.

    Only the lower triangles are read. Returns whether each is positive definite, bool [...]; the content of
    the others is undefined.

    ranks: those that have the same matrix, and share the work, unless it is a batch. So in the other
        functions.
    """
    ranks = sharing(matrix, ranks)
    if matrix.shape[-1] <= _block(matrix):
        if is_gpu(matrix.device) and matrix.dim() > 2 and matrix.shape[-1] > MOST_IN_BATCH:
            return torch.stack([cholesky_(one) for one in matrix])
        info = torch.empty(matrix.shape[:-2], dtype=torch.int32, device=matrix.device)
        torch.linalg.cholesky_ex(matrix, out=(matrix, info))
        # seen on an H200: NaN in the factor of a singular matrix, and an info of 0
        return (info == 0) & (matrix.diagonal(dim1=-2, dim2=-1) > 0).all(-1)
    top, left, bottom, right = _quarters(matrix)
    found = cholesky_(top, ranks)
    if not found.any():
        return found
    own = left[ranks.share(len(left))]
    own.copy_(torch.linalg.solve_triangular(top.mT, own, upper=True, left=False))
    ranks.gather_rows_(left)
    _add_gram_(bottom, left.mT, alpha=-1, ranks=ranks, mirrored=False)
    right.zero_()
    return found & cholesky_(bottom, ranks)


def inverse_of_factor_(lower: Tensor, ranks: Ranks = ALONE) -> None:
    """Replaces the Cholesky factors L [..., n, n] of matrices by their inverses, (L Lᵀ)⁻¹ = L⁻ᵀ L⁻¹."""
    invert_lower_(lower, ranks)
    _gram_(lower, ranks)


def sharing(matrix: Tensor, ranks: Ranks) -> Ranks:
    """Those of `ranks` that share the work on `matrix`: only this one for a batch, and for a small matrix."""
    return ranks if matrix.dim() == 2 and len(matrix) > WHOLE else ALONE


def _block(matrix: Tensor) -> int:
    return GPU_BLOCK if is_gpu(matrix.device) else CPU_BLOCK


def _quarters(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the upper left, lower left, lower right and upper right part, cut at a multiple of a block."""
    block = _block(matrix)
    cut = (matrix.shape[-1] // 2 + block - 1) // block * block
    top, bottom = matrix[..., :cut, :], matrix[..., cut:, :]
    return top[..., :cut], bottom[..., :cut], bottom[..., cut:], top[..., cut:]


def invert_lower_(lower: Tensor, ranks: Ranks = ALONE) -> None:
    """Replaces lower triangular matrices L [..., n, n], fp32 or fp64, with 0 above the diagonal, by L⁻¹."""
    ranks = sharing(lower, ranks)
    if lower.shape[-1] <= _block(lower):
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False))
        return
    top, left, bottom, _ = _quarters(lower)
    invert_lower_(top, ranks)
    invert_lower_(bottom, ranks)
    _share_multiply_(bottom, left, ranks)
    _share_multiply_(top, left.mT, ranks, transposed=True)
    left.neg_()


def _gram_(lower: Tensor, ranks: Ranks = ALONE) -> None:
    """L ← Lᵀ L."""
    ranks = sharing(lower, ranks)
    if lower.shape[-1] <= _block(lower):
        lower.copy_(lower.mT @ lower)
        return
    top, left, bottom, right = _quarters(lower)
    _gram_(top, ranks)
    _add_gram_(top, left, ranks=ranks)
    _share_multiply_(bottom, left, ranks, transposed=True)
    right.copy_(left.mT)
    _gram_(bottom, ranks)


def _share_multiply_(lower: Tensor, matrix: Tensor, ranks: Ranks, *, transposed: bool = False) -> None:
    """`_multiply_`, of which each rank computes columns."""
    _multiply_(lower, matrix[..., ranks.share(matrix.shape[-1])], transposed=transposed)
    ranks.gather_rows_(matrix.mT)


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


def _add_gram_(
    symmetric: Tensor, a: Tensor, alpha: float = 1.0, ranks: Ranks = ALONE, *, mirrored: bool = True
) -> None:
    """symmetric [..., n, n] += alpha · aᵀ a for a [..., any length, n].

    mirrored: whether the upper triangle is needed too. Above WHOLE columns it is a copy of the lower one.
    """
    if ranks.size > 1:
        _share_gram_(symmetric, a, alpha, ranks, mirrored=mirrored)
        return
    if symmetric.shape[-1] <= WHOLE:
        add_product(symmetric, a.mT, a, alpha)
        return
    top, left, bottom, right = _quarters(symmetric)
    before, after = a.tensor_split([top.shape[-1]], -1)
    _add_gram_(top, before, alpha, mirrored=mirrored)
    _add_gram_(bottom, after, alpha, mirrored=mirrored)
    add_product(left, after.mT, before, alpha)
    if mirrored:
        right.copy_(left.mT)


def _share_gram_(symmetric: Tensor, a: Tensor, alpha: float, ranks: Ranks, *, mirrored: bool) -> None:
    """`_add_gram_` of one matrix: each rank computes a panel of rows from each end, which are equal work.

    A panel reaches from the first column to the diagonal. If `mirrored`, the blocks above the diagonal are
    copies; otherwise they are undefined.
    """
    count, size = 2 * ranks.size, len(symmetric)
    stops = [size * i // count for i in range(count + 1)]
    panels = [slice(start, stop) for start, stop in itertools.pairwise(stops)]
    for panel in (panels[ranks.rank], panels[count - 1 - ranks.rank]):
        symmetric[panel, : panel.stop].addmm_(a[:, panel].T, a[:, : panel.stop], alpha=alpha)
    half = panels[ranks.size].start
    ranks.gather_rows_(symmetric[:half, :half], panels[: ranks.size])
    ranks.gather_rows_(symmetric, panels[: ranks.size - 1 : -1])
    for panel in panels if mirrored else ():
        symmetric[: panel.start, panel] = symmetric[panel, : panel.start].T
