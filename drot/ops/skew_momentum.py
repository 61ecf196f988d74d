"""`skew_momentum`: the moments of a step in so(n), in one pass over their matrices."""

import torch
from torch import Tensor


@torch.no_grad()
def skew_momentum(
    product: Tensor, momentum: Tensor, decay: float, square_decay: float | None = None
) -> Tensor:
    """Nesterov's sum u = S + decay · m' of S = product - productᵀ and the new momentum m' = decay · m + S.

    With `square_decay`, u is Adam's ratio m'/√v' instead, for the new squares v' = square_decay · v + S²;
    where v' is 0, so is u. The moments have no factors 1 - decay: those would multiply u by a number.

    S, the moments and u are computed in fp32 and then rounded.

    product: [..., n, n] bf16.
    momentum: [..., n, n] bf16, contiguous. Its elements above the diagonal are those of m, which is
        skew-symmetric, and are replaced by those of m'. The elements below the diagonal are those of v, which
        is symmetric, and are replaced by those of v'. Without `square_decay` they are neither read nor
        written. The diagonal never is.
    decay: the factor of the old momentum.
    square_decay: the factor of the old squares, between 0 and 1.

    Returns u [..., n, n] in bf16, skew-symmetric. Nothing here has a gradient. Raises ValueError for other
    shapes, dtypes or strides, for a decay that is not finite, and for a square_decay outside of its range.
    """
    return torch.ops.drot.skew_momentum(product, momentum, decay, square_decay)


@torch.no_grad()
def skew_momentum_ref(
    product: Tensor, momentum: Tensor, decay: float, square_decay: float | None = None
) -> Tensor:
    """`skew_momentum` in plain PyTorch, in place too."""
    s = (product.float() - product.float().mT).triu(1)
    updated = decay * momentum.float().triu(1) + s
    u = s + decay * updated
    new = updated + momentum.float().tril()
    if square_decay is not None:
        squares = square_decay * momentum.float().tril(-1) + s.square().mT
        u = torch.where(squares.mT > 0, updated / squares.mT.sqrt(), 0).triu(1)
        new = new.triu() + squares
    momentum.copy_(new)
    return (u - u.mT).bfloat16()
