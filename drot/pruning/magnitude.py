"""Magnitude pruning, which removes the weights with the smallest |W|."""

import torch
from torch import Tensor

from drot.config import Sparsity
from drot.machine.finite import check_finite
from drot.machine.ranks import ALONE, Ranks
from drot.pruning.masks import removed_mask
from drot.pruning.result import PruneOutcome


def prune_magnitude(weight: Tensor, sparsity: Sparsity, *, ranks: Ranks = ALONE) -> PruneOutcome:
    """Removes the smallest |W| of each group (n:m) or of the whole matrix (ratio).

    weight: [..., out, in], any float dtype.
    ranks: those that prune the other rows.

    Raises UserError for a weight that is not finite.
    """
    check_finite(weight, "weight")
    removed = removed_mask(weight.abs(), sparsity, scope="matrix", ranks=ranks)
    return PruneOutcome(torch.where(removed, 0, weight), removed)
