"""`skew_momentum`: the momentum of a step in so(n), in one pass over its matrices."""

import torch
from torch import Tensor


def skew_momentum(product: Tensor, momentum: Tensor, decay: float) -> Tensor:
    """Nesterov's sum u = S + decay · m' of S = product - productᵀ and the new momentum m' = decay · m + S.

    S, m' and u are computed in fp32 and then rounded.

    product: [..., n, n] bf16.
    momentum: m [..., n, n] bf16, contiguous. Its elements above the diagonal are replaced by those of m'. The
        others are neither read nor written, as m is skew-symmetric.
    decay: the factor of the old momentum.

    Returns u [..., n, n] in bf16, skew-symmetric. Nothing here has a gradient. Raises ValueError for other
    shapes, dtypes or strides, and for a decay that is not finite.
    """
    with torch.no_grad():
        u: Tensor = torch.ops.drot.skew_momentum(product, momentum, decay)
    return u


@torch.no_grad()
def skew_momentum_ref(product: Tensor, momentum: Tensor, decay: float) -> Tensor:
    """`skew_momentum` in plain PyTorch, in place too."""
    s = product.float() - product.float().mT
    updated = decay * momentum.float() + s
    momentum.copy_(torch.where(torch.ones_like(s, dtype=torch.bool).triu(1), updated, momentum))
    u = (s + decay * updated).triu(1)
    return (u - u.mT).bfloat16()
