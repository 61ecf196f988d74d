"""The mask of the removed weights, which are the weights with the smallest scores."""

import math
from typing import Literal

from torch import Tensor

from drot.config import Sparsity
from drot.machine.ranks import ALONE, Ranks
from drot.ops.nm_mask import nm_mask

Scope = Literal["row", "matrix"]


def removed_mask(score: Tensor, sparsity: Sparsity, *, scope: Scope, ranks: Ranks = ALONE) -> Tensor:
    """Bool [..., out, in], True where a weight is removed, from its score [..., out, in].

    n:m removes the m - n smallest scores of every m neighbours along the input dimension, a multiple of m,
    for either scope. A ratio removes the int(in · ratio) smallest scores of each row (scope `row`), or the
    int(out · in · ratio) smallest of the matrix (scope `matrix`). If scores are equal, the first in row-major
    order goes first.

    ranks: those that hold the other rows of the matrix.
    """
    if sparsity.structured:
        return nm_mask(score.flatten(0, -2), sparsity.m - sparsity.n, sparsity.m).view(score.shape)
    if scope == "row":
        return nm_mask(score.flatten(0, -2), int(score.shape[-1] * sparsity.ratio), 0).view(score.shape)
    whole = ranks.gather_rows(score)
    flat = whole.reshape(math.prod(whole.shape[:-2]), -1)
    mask = nm_mask(flat, int(flat.shape[1] * sparsity.ratio), 0).reshape(whole.shape)
    return mask[..., ranks.share(whole.shape[-2]), :]
