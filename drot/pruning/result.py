"""The result of pruning one weight, with the error of the layer's outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drot.errors import UserError


@dataclass(frozen=True)
class PruneOutcome:
    """One pruned weight.

    weight: [out, in] in the dtype of the dense weight, 0 where a weight is removed.
    removed: bool [out, in], True where a weight is removed.
    damping: the share of mean(diag H) with which the Hessian was inverted; None for a method that inverts no
        Hessian.
    output_error: relative squared error of the outputs on the calibration inputs; None without a Hessian.
    admm_iterations: iterations of ADMM.
    """

    weight: Tensor
    removed: Tensor
    damping: float | None = None
    output_error: float | None = None
    admm_iterations: int = 0


def output_error(weight: Tensor, pruned: Tensor, hessian: Tensor) -> float:
    """tr((W - Ŵ) H (W - Ŵ)ᵀ) / tr(W H Wᵀ) = ‖X (W - Ŵ)ᵀ‖² / ‖X Wᵀ‖² where H ∝ XᵀX.

    weight, pruned: [out, in], any float dtype. hessian: [in, in]. Returns 0 if all outputs are 0.
    """
    dtype = torch.promote_types(hessian.dtype, torch.float32)
    dense = weight.to(dtype)
    change = dense - pruned.to(dtype)
    hessian = hessian.to(dtype)
    # row by row: the order of a sum over the whole matrix would depend on the number of threads
    total = ((dense @ hessian) * dense).sum(1, dtype=torch.float64).sum()
    lost = ((change @ hessian) * change).sum(1, dtype=torch.float64).sum()
    return float(lost / total) if total > 0 else 0.0


def check_finite(tensor: Tensor, name: str) -> None:
    """Raises UserError if `tensor` holds NaN or Inf, for which scores have no order."""
    if not bool(torch.isfinite(tensor).all()):
        raise UserError(
            f"{name} must be finite, got NaN or Inf in a tensor of shape {list(tensor.shape)}: "
            "check the checkpoint, or load the model in bfloat16 or float32"
        )
