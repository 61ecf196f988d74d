"""Folding the weight of an RMSNorm into the linears that read its output (paper, algorithm 1, first step).

norm(h) · diag(γ) · Wᵀ = norm(h) · (W diag(γ))ᵀ. The norm that remains has no weight and commutes with
rotations.
"""

from typing import Any

import torch
from torch import Tensor


def norm_scale(norm: Any, offset: float) -> Tensor:
    """The factor γ [d] of the norm, in fp64: its weight plus the offset of the family."""
    return norm.weight.detach().double() + offset


@torch.no_grad()
def reset_norm(norm: Any, offset: float) -> None:
    """Sets the norm's weight so that γ = 1."""
    norm.weight.fill_(1.0 - offset)


def fold(weight: Tensor, scale: Tensor | None) -> Tensor:
    """weight [out, in] · diag(scale [in]) in fp64; `scale=None` stands for 1."""
    return weight.double() if scale is None else weight.double() * scale
