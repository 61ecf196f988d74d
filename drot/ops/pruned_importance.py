"""`pruned_importance`: the importance that a mask of smallest scores removes."""

import torch
from torch import Tensor

from drot.ops.nm_mask import nm_mask_ref


def pruned_importance_ref(
    y: Tensor, m: Tensor | None = None, *, prune: int, group: int, scale: float = 1.0
) -> Tensor:
    """Plain PyTorch form of `pruned_importance`, in y's own dtype, differentiable in y and m."""
    scores = y.square() if m is None else y.square() * m
    removed = nm_mask_ref(scores.detach(), prune, group)
    return scale * torch.where(removed, scores, 0.0).sum()
