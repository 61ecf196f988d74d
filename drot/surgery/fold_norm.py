"""Folding an RMSNorm's weight into the linears behind it (paper, algorithm 1, first step).

norm(h) · diag(γ) · Wᵀ = norm(h) · (W diag(γ))ᵀ: what is left of the norm commutes with rotations.
"""

from typing import Any

import torch
from torch import Tensor


def norm_scale(norm: Any, offset: float) -> Tensor:
    """The γ [d] in fp64 that the norm really multiplies with: its weight plus the family's offset."""
    return norm.weight.detach().double() + offset


@torch.no_grad()
def reset_norm(norm: Any, offset: float) -> None:
    """Sets the norm's weight so that it multiplies with 1."""
    norm.weight.fill_(1.0 - offset)


def fold(weight: Tensor, scale: Tensor | None) -> Tensor:
    """weight [out, in] · diag(scale [in]) in fp64; a scale of None is the identity."""
    return weight.double() if scale is None else weight.double() * scale
