"""`entropy_loss`: entropy of the normalised importance scores of a rotated weight (paper, equation 5)."""

import torch
from torch import Tensor


def entropy_loss_ref(
    y: Tensor, m: Tensor | None = None, *, rows: bool = True, columns: bool = False, scale: float = 1.0
) -> Tensor:
    """Plain PyTorch form of `entropy_loss`, in y's own dtype, differentiable in y and m."""
    scores = y.square() if m is None else y.square() * m
    loss = scores.new_zeros(())
    for axis in ([1] if rows else []) + ([0] if columns else []):
        loss = loss + _entropies(scores, axis).sum()
    return scale * loss


def _entropies(scores: Tensor, axis: int) -> Tensor:
    """H = log Z - T / Z of each group along `axis`, 0 where Z is."""
    tiny = torch.finfo(scores.dtype).tiny
    z = scores.sum(axis)
    # at a score of 0 log's gradient would be inf · 0, at a sum of 0 the quotient's 0 / 0
    t = (scores * scores.clamp_min(tiny).log()).sum(axis)
    some = torch.where(z > 0, z, 1.0)
    return torch.where(z > 0, some.log() - t / some, 0.0)
