"""Wanda (Sun et al. 2024), which removes the smallest |W_ij| · ‖X_j‖ of each row."""

import torch
from torch import Tensor

from drot.calibration.hessian import Scalar
from drot.config import Sparsity
from drot.core.errors import UserError
from drot.machine.finite import check_finite
from drot.machine.ranks import ALONE, Ranks
from drot.pruning.masks import removed_mask
from drot.pruning.result import PruneOutcome, with_output_error


def prune_wanda(
    weight: Tensor,
    hessian_diag: Tensor,
    sparsity: Sparsity,
    *,
    hessian: Tensor | None = None,
    total: Scalar | None = None,
    ranks: Ranks = ALONE,
) -> PruneOutcome:
    """Removes the smallest |W_ij| · sqrt(H_jj) of each group (n:m) or of each row (ratio).

    The score is computed in fp32, or in fp64 if an argument is fp64.

    Raises UserError for values that are not finite, a negative diagonal, or an `in` that is not a multiple of
    m.

    weight: [..., out, in], any float dtype.
    hessian_diag: [..., in], the diagonal of H ∝ XᵀX; its square root is proportional to ‖X_j‖.
    hessian: H [..., in, in], used only for the output error of the result.
    total: tr(W H Wᵀ), where it is known.
    ranks: those that prune the other rows.
    """
    if hessian_diag.shape != (*weight.shape[:-2], weight.shape[-1]):
        raise UserError(
            f"hessian_diag must be [{weight.shape[-1]}] for a weight of shape {list(weight.shape)}, "
            f"got {list(hessian_diag.shape)}"
        )
    check_finite(weight, "weight")
    check_finite(hessian_diag, "hessian_diag")
    if bool((hessian_diag < 0).any()):
        raise UserError("hessian_diag must not be negative, got values below 0: give the diagonal of XᵀX")
    dtype = torch.promote_types(torch.promote_types(weight.dtype, hessian_diag.dtype), torch.float32)
    score = weight.to(dtype).abs() * hessian_diag.to(dtype).sqrt()[..., None, :]
    removed = removed_mask(score, sparsity, scope="row")
    pruned = torch.where(removed, 0, weight)
    return with_output_error(PruneOutcome(pruned, removed, energy=total), weight, hessian, ranks)
