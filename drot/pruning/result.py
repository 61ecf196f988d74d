"""The result of pruning one weight, with the error of the layer's outputs."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from drot.calibration.hessian import Scalar, energy
from drot.machine.ranks import ALONE, Ranks


@dataclass(frozen=True)
class PruneOutcome:
    """One pruned weight, or the rows of it that a rank has pruned. The figures are of all rows.

    Or a batch of weights [batch, out, in]; a figure is then one for each, fp64 [batch].

    weight: [..., out, in] in the dtype of the dense weight, 0 where a weight is removed.
    removed: bool [..., out, in], True where a weight is removed.
    damping: the damping λ of the inverted Hessian; None for a method that inverts no Hessian.
    output_error: relative squared error of the outputs on the calibration inputs (`output_error`), without
        damping; None without a Hessian. The error of SparseGPT is that of the weights before they are rounded
        to their dtype.
    energy: tr(W H Wᵀ) of the dense weight W, the denominator of output_error; None without a Hessian.
    admm_iterations: iterations of ADMM.
    """

    weight: Tensor
    removed: Tensor
    damping: Scalar | None = None
    output_error: Scalar | None = None
    energy: Scalar | None = None
    admm_iterations: int | Tensor = 0


def output_error(
    weight: Tensor, pruned: Tensor, hessian: Tensor, total: Scalar | None = None, ranks: Ranks = ALONE
) -> Scalar:
    """tr((W - Ŵ) H (W - Ŵ)ᵀ) / tr(W H Wᵀ) = ‖X (W - Ŵ)ᵀ‖² / ‖X Wᵀ‖² where H ∝ XᵀX.

    weight, pruned: [..., out, in], any float dtype. hessian: [..., in, in], symmetric. total:
    tr(W H Wᵀ), where it is known. ranks: those that hold the other rows. Returns 0 if all outputs are 0.
    """
    dtype = torch.promote_types(hessian.dtype, torch.float32)
    hessian = hessian.to(dtype)
    total = energy(weight, hessian, ranks) if total is None else total
    return relative_error(energy(weight.to(dtype) - pruned.to(dtype), hessian, ranks), total)


def with_output_error(
    outcome: PruneOutcome, weight: Tensor, hessian: Tensor, total: Scalar | None, ranks: Ranks
) -> PruneOutcome:
    """The outcome with its `output_error` against the dense weight [..., out, in], and its energy."""
    total = energy(weight, hessian, ranks) if total is None else total
    error = output_error(weight, outcome.weight, hessian, total, ranks)
    return dataclasses.replace(outcome, output_error=error, energy=total)


def relative_error(lost: Scalar, total: Scalar) -> Scalar:
    """lost / total; 0 if total is 0, and if rounding made `lost` negative."""
    if isinstance(lost, Tensor):
        return torch.where(torch.as_tensor(total > 0), lost.clamp_min(0) / total, 0)
    return max(lost, 0.0) / total if total > 0 else 0.0
