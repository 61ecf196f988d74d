"""Which weights go, given a score for each: the smaller the score, the sooner."""

from typing import Literal

import torch
from torch import Tensor

from drot.config import Sparsity
from drot.errors import UserError
from drot.ops.nm_mask import nm_mask

Scope = Literal["row", "matrix"]


def check_groups(shape: torch.Size, sparsity: Sparsity) -> None:
    """Raises UserError where n:m does not divide the input dimension."""
    if sparsity.structured and shape[1] % sparsity.m:
        raise UserError(
            f"{sparsity} needs an input dimension that is a multiple of {sparsity.m}, got a weight of "
            f"shape {list(shape)}; prune it by a ratio, or choose another n:m"
        )


def removed_mask(score: Tensor, sparsity: Sparsity, *, scope: Scope) -> Tensor:
    """The mask of `sparsity` on `score` [out, in], True = removed.

    n:m removes the m - n smallest of every m neighbours along the input dimension, whatever the
    scope. A ratio removes exactly int(in · ratio) of each row, or int(out · in · ratio) of the
    matrix. Of equal scores the one that comes first (in row-major order) goes first.
    Raises UserError where m does not divide `in`.
    """
    check_groups(score.shape, sparsity)
    if sparsity.structured:
        return nm_mask(score, sparsity.m - sparsity.n, sparsity.m)
    if scope == "row":
        return nm_mask(score, int(score.shape[1] * sparsity.ratio), 0)
    flat = score.reshape(1, -1)
    return nm_mask(flat, int(flat.shape[1] * sparsity.ratio), 0).reshape(score.shape)
