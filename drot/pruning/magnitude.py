"""Magnitude pruning, which removes the weights with the smallest |W|."""

import torch
from torch import Tensor

from drot.calibration.hessian import Scalar
from drot.config import Sparsity
from drot.machine.finite import check_finite
from drot.machine.ranks import ALONE, Ranks
from drot.pruning.masks import removed_mask
from drot.pruning.result import PruneOutcome, with_output_error


def prune_magnitude(
    weight: Tensor,
    sparsity: Sparsity,
    *,
    hessian: Tensor | None = None,
    total: Scalar | None = None,
    ranks: Ranks = ALONE,
) -> PruneOutcome:
    """Removes the smallest |W| of each group (n:m) or of the whole matrix (ratio).

    weight: [..., out, in], any float dtype.
    hessian: H [..., in, in], used only for the output error of the result.
    total: tr(W H Wᵀ), where it is known.
    ranks: those that prune the other rows.

    Raises UserError for a weight that is not finite or whose `in` is not a multiple of m.
    """
    check_finite(weight, "weight")
    removed = removed_mask(weight.abs(), sparsity, scope="matrix", ranks=ranks)
    pruned = torch.where(removed, 0, weight)
    return with_output_error(PruneOutcome(pruned, removed, energy=total), weight, hessian, ranks)
