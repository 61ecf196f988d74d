"""`pruned_importance`: the sum of the scores that a mask removes (paper, equation 4, right-hand side)."""

import torch
from torch import Tensor

from drot.ops.entropy_loss import scores_ref
from drot.ops.nm_mask import nm_mask_ref


def pruned_importance(
    y: Tensor, column_scale: Tensor | None = None, *, prune: int, group: int, scale: float = 1.0
) -> Tensor:
    """scale · Σ of the `prune` smallest scores s = y² · column_scale of every group of columns of a row.

    If scores are equal, the lowest column is removed first, as by `nm_mask`. The scores must be finite in the
    loss's dtype.

    Args:
        y: [r, c], bf16, fp16, fp32 or fp64: the weight.
        column_scale: [c], fp32 (fp64 for fp64 y), not negative; None for 1.
        prune: scores to remove from each group.
        group: neighbouring columns of a group, 1 to 32 and a divisor of c; 0 for the whole row.
        scale: factor of the loss.

    Returns a 0-dim fp32 tensor (fp64 for fp64 y), differentiable once in y and column_scale for a fixed mask.

    Raises ValueError for other shapes, dtypes or groups. On the CPU non-finite scores and a negative
    column_scale raise ValueError too; on a GPU they make the loss NaN, because the CPU does not wait for the
    values.
    """
    return torch.ops.drot.pruned_importance(y, column_scale, prune=prune, group=group, scale=scale)[0]


@torch.no_grad()
def pruned_importance_and_grad(
    y: Tensor, column_scale: Tensor | None = None, *, prune: int, group: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`pruned_importance` and its gradients, without an autograd graph, with the arguments of that function.

    Returns loss (0-dim), dy [r, c] in y's dtype and dcolumn_scale [c] in column_scale's dtype, [0] for None.
    """
    return torch.ops.drot.pruned_importance(y, column_scale, prune=prune, group=group, scale=scale)


def pruned_importance_ref(
    y: Tensor, column_scale: Tensor | None = None, *, prune: int, group: int, scale: float = 1.0
) -> Tensor:
    """`pruned_importance` in plain PyTorch, differentiable any number of times."""
    s = scores_ref(y, column_scale)
    return scale * torch.where(nm_mask_ref(s.detach(), prune, group), s, 0).sum()
