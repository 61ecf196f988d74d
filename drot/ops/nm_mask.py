"""`nm_mask`: which scores of a matrix are removed, n:m or the smallest k of each row."""

import torch
from torch import Tensor


def nm_mask(score: Tensor, prune: int, group: int) -> Tensor:
    """Which scores go: the `prune` smallest of every `group` neighbours of a row.

    score: [r, c], bf16, fp16, fp32 or fp64. group: 1 to 32 and a divisor of c, or 0 for the whole
    row. Returns bool [r, c], True = removed; it carries no gradient. Of equal scores the lower
    column goes first; NaN counts as larger than every number, so it goes last.
    Raises ValueError for another shape or dtype, a group that does not divide c, or a prune beyond
    the group.
    """
    return torch.ops.drot.nm_mask(score, prune, group)


@torch.library.register_fake("drot::nm_mask")
def _(score: Tensor, prune: int, group: int) -> Tensor:
    return score.new_empty(score.shape, dtype=torch.bool)


def nm_mask_ref(score: Tensor, prune: int, group: int) -> Tensor:
    """Plain PyTorch form of `nm_mask`: a stable sort of each group."""
    if score.numel() == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    rows, columns = score.shape
    grouped = score.reshape(rows, -1, group or columns)
    order = grouped.sort(dim=-1, stable=True).indices[..., :prune]
    removed = torch.zeros_like(grouped, dtype=torch.bool).scatter_(-1, order, True)
    return removed.reshape(rows, columns)
