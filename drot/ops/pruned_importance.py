"""`pruned_importance`: the sum of the scores that a mask removes (paper, equation 4, right-hand side)."""

import torch
from torch import Tensor

from drot.ops.entropy_loss import fake_loss_and_gradients, register_loss_autograd, scores_ref
from drot.ops.nm_mask import nm_mask_ref


def pruned_importance(
    y: Tensor, m: Tensor | None = None, *, prune: int, group: int, scale: float = 1.0
) -> Tensor:
    """scale · Σ of the `prune` smallest scores s = y²·m of every `group` neighbours of a row.

    y: [r, c], bf16, fp16, fp32 or fp64; m: [c], the factor of each column, not negative, fp32 (fp64
    for fp64 y), or None for 1. group: 1 to 32 and a divisor of c, or 0 for the whole row. Ties as in
    `nm_mask`: the lower column is removed first.
    Returns a 0-dim fp32 tensor (fp64 for fp64 y), differentiable once in y and m, the choice of the
    removed scores held fixed. y²·m must stay finite in that type.

    On the CPU, non-finite or negative input raises ValueError, as do other shapes and dtypes. On a
    GPU nothing waits for the values, so there non-finite or negative input makes the loss NaN.
    """
    loss: Tensor = torch.ops.drot.pruned_importance(y, m, prune=prune, group=group, scale=scale)[0]
    return loss


def pruned_importance_and_grad(
    y: Tensor, m: Tensor | None = None, *, prune: int, group: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of `pruned_importance` with its gradients, outside of autograd.

    Returns loss (0-dim), dy [r, c] in y's dtype and dm [c] in m's (empty where m is None).
    """
    with torch.no_grad():
        loss, dy, dm = torch.ops.drot.pruned_importance(y, m, prune=prune, group=group, scale=scale)
    return loss, dy, dm


@torch.library.register_fake("drot::pruned_importance")
def _(
    y: Tensor, m: Tensor | None = None, *, prune: int, group: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_loss_and_gradients(y, m)


register_loss_autograd("pruned_importance")


def pruned_importance_ref(
    y: Tensor, m: Tensor | None = None, *, prune: int, group: int, scale: float = 1.0
) -> Tensor:
    """Plain PyTorch form of `pruned_importance`, differentiable any number of times."""
    s = scores_ref(y, m)
    return scale * torch.where(nm_mask_ref(s.detach(), prune, group), s, 0).sum()
