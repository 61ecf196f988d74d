"""Wanda (Sun et al. 2024), which removes the smallest |W_ij| · ‖X_j‖ of each row."""

import torch
from torch import Tensor

from drot.config import Sparsity
from drot.machine.finite import check_finite
from drot.pruning.masks import removed_mask
from drot.pruning.result import PruneOutcome


def prune_wanda(weight: Tensor, hessian_diag: Tensor, sparsity: Sparsity) -> PruneOutcome:
    """Removes the smallest |W_ij| · sqrt(H_jj) of each group (n:m) or of each row (ratio).

    The score is computed in fp32, or in fp64 if an argument is fp64.

    Raises UserError for values that are not finite.

    weight: [..., out, in], any float dtype.
    hessian_diag: [..., in], the diagonal of H ∝ XᵀX; its square root is proportional to ‖X_j‖.
    """
    check_finite(weight, "weight")
    check_finite(hessian_diag, "hessian_diag")
    dtype = torch.promote_types(torch.promote_types(weight.dtype, hessian_diag.dtype), torch.float32)
    score = weight.to(dtype).abs() * hessian_diag.to(dtype).sqrt()[..., None, :]
    removed = removed_mask(score, sparsity, scope="row")
    return PruneOutcome(torch.where(removed, 0, weight), removed)
