"""`nm_mask`: which scores of a matrix are removed, n:m or the smallest k of each row."""

import torch
from torch import Tensor


def nm_mask_ref(score: Tensor, prune: int, group: int) -> Tensor:
    """Plain PyTorch form of `nm_mask`: a stable sort of each group.

    score: [r, c], any float dtype. prune: how many go in each group of `group` neighbours of a row
    (group = 0: of the whole row). Returns bool [r, c], True = removed. Of equal scores the lower
    column goes first; NaN counts as larger than every number.
    """
    if score.numel() == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    rows, columns = score.shape
    grouped = score.reshape(rows, -1, group or columns)
    order = grouped.sort(dim=-1, stable=True).indices[..., :prune]
    removed = torch.zeros_like(grouped, dtype=torch.bool).scatter_(-1, order, True)
    return removed.reshape(rows, columns)
