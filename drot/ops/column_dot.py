"""`column_dot`: the dot products of equal columns of two matrices, in one pass over both."""

import torch
from torch import Tensor


def column_dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_i a[:, i, j] · b[:, i, j] for every column j, without the matrix a ∘ b.

    a, b: [count, rows, columns] fp32.

    Returns [count, columns] in fp32; 0 for matrices without rows. The result has no gradient.

    Raises ValueError for other shapes and dtypes.
    """
    with torch.no_grad():
        dots: Tensor = torch.ops.drot.column_dot(a, b)
    return dots


@torch.no_grad()
def column_dot_ref(a: Tensor, b: Tensor) -> Tensor:
    """`column_dot` in plain PyTorch."""
    return (a * b).sum(1)
