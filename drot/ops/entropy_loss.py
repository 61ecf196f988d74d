"""`entropy_loss`: the entropy of the normalised scores of rows and columns (paper, equations 5 and 6)."""

import torch
from torch import Tensor


def entropy_loss(
    y: Tensor,
    column_scale: Tensor | None = None,
    *,
    rows: bool = True,
    columns: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """scale · Σ H over rows and/or columns of s = y² · column_scale, with H = -Σ p log p and p = s / Σ s.

    0 · log 0 = 0: a score of 0 adds nothing and has gradient 0, and so has every score of a row or column
    whose sum is 0. A score below the smallest normal number of the loss's dtype counts as 0. The scores and
    their sums must be finite in that dtype.

    Args:
        y: [r, c], bf16, fp16, fp32 or fp64: the weight.
        column_scale: [c], fp32 (fp64 for fp64 y), not negative; None for 1.
        rows: adds the entropy of every row.
        columns: adds the entropy of every column.
        scale: factor of the loss.

    Returns a 0-dim fp32 tensor (fp64 for fp64 y), differentiable once in y and column_scale.

    Raises ValueError for other shapes or dtypes and without rows and columns. On the CPU non-finite scores
    and a negative column_scale raise ValueError too; on a GPU they make the loss NaN, because the CPU does
    not wait for the values.
    """
    return torch.ops.drot.entropy_loss(y, column_scale, rows=rows, columns=columns, scale=scale)[0]


@torch.no_grad()
def entropy_loss_and_grad(
    y: Tensor,
    column_scale: Tensor | None = None,
    *,
    rows: bool = True,
    columns: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`entropy_loss` and its gradients, without an autograd graph, with the arguments of `entropy_loss`.

    Returns loss (0-dim), dy [r, c] in y's dtype and dcolumn_scale [c] in column_scale's dtype, [0] for None.
    """
    return torch.ops.drot.entropy_loss(y, column_scale, rows=rows, columns=columns, scale=scale)


def entropy_loss_ref(
    y: Tensor,
    column_scale: Tensor | None = None,
    *,
    rows: bool = True,
    columns: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """`entropy_loss` in plain PyTorch, differentiable any number of times."""
    s = scores_ref(y, column_scale)
    s = torch.where(s > 0, s, 0)
    loss = s.new_zeros(())
    for dim in [1] * rows + [0] * columns:
        z = s.sum(dim, keepdim=True)
        p = s / torch.where(z > 0, z, 1)
        loss = loss - (p * torch.where(p > 0, p, 1).log()).sum()
    return scale * loss


def scores_ref(y: Tensor, column_scale: Tensor | None) -> Tensor:
    """y² · column_scale [r, c] in fp32 (fp64 for fp64 y), multiplied in the order of the native ops."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    return wide.square() if column_scale is None else wide * (wide * column_scale)
