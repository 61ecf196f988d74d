"""`nm_mask`: the mask that removes the smallest scores, n:m or of each row."""

import torch
from torch import Tensor


def nm_mask(score: Tensor, prune: int, group: int) -> Tensor:
    """The mask of the `prune` smallest scores of every `group` neighbouring columns of a row.

    score: [r, c], bf16, fp16, fp32 or fp64. group: 1 to 32 and a divisor of c, or 0 for the whole row.
    Returns bool [r, c], True where a score is removed, without a gradient. If scores are equal, the
    lowest column is removed first; NaN is larger than every number.

    Raises ValueError for another shape or dtype, a group that does not divide c, and prune outside of the
    group.
    """
    return torch.ops.drot.nm_mask(score, prune, group)


def nm_mask_ref(score: Tensor, prune: int, group: int) -> Tensor:
    """`nm_mask` in plain PyTorch, by a stable sort of each group."""
    if score.numel() == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    rows, columns = score.shape
    grouped = score.reshape(rows, -1, group or columns)
    order = grouped.sort(dim=-1, stable=True).indices[..., :prune]
    removed = torch.zeros_like(grouped, dtype=torch.bool).scatter_(-1, order, True)
    return removed.reshape(rows, columns)
