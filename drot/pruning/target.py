"""The weight whose outputs on the pruned model's inputs are nearest to the outputs of the dense model."""

from torch import Tensor

from drot.calibration.dense_reference import TargetStatistics
from drot.calibration.hessian import HessianFactor


def dense_target(
    weight: Tensor, statistics: TargetStatistics, factor: HessianFactor, *, share: float
) -> Tensor:
    """T = W + share · (W C + E) (H + D)⁻¹ [out, in] with the damping D of `factor`, in fp32 at least.

    With share 1 and D = 0, T x is the least-squares fit of W x_dense + r_dense - r. (GPTAQ, arXiv 2504.02692,
    has the term W C; the term E is ours.)

    weight: W [out, in], any float dtype. statistics: H, C and E. factor: of H.
    share: the share of the way from W to the fit, in [0, 1].
    """
    hinv = factor.hinv
    dense = weight.to(hinv.dtype)
    change = dense @ statistics.input_change
    if statistics.residual_change is not None:
        change = change + statistics.residual_change
    return dense + share * (change @ hinv.T) @ hinv
