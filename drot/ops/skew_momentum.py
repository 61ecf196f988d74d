"""`skew_momentum`: the momentum of a step in so(n), in one pass over its matrices."""

import torch
from torch import Tensor


def skew_momentum(product: Tensor, momentum: Tensor, decay: float) -> Tensor:
    """Nesterov's sum u = S + decay · m' of S = product - productᵀ and the new momentum m' = decay · m + S.

    product: [..., n, n] fp32.
    momentum: m [..., n, n] fp32, contiguous; it is replaced by m'.
    decay: the factor of the old momentum.

    Returns u [..., n, n] in bf16. Nothing here has a gradient. Raises ValueError for other shapes, dtypes or
    strides, and for a decay that is not finite.
    """
    with torch.no_grad():
        u: Tensor = torch.ops.drot.skew_momentum(product, momentum, decay)
    return u


@torch.no_grad()
def skew_momentum_ref(product: Tensor, momentum: Tensor, decay: float) -> Tensor:
    """`skew_momentum` in plain PyTorch, in place too."""
    s = product - product.mT
    momentum.mul_(decay).add_(s)
    return (s + decay * momentum).bfloat16()
