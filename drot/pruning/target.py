"""The weight whose outputs on the pruned model's inputs are nearest to the outputs of the dense model."""

from torch import Tensor

from drot.calibration.hessian import HessianFactor
from drot.calibration.layer_pass import TargetStatistics


def dense_target(
    weight: Tensor, statistics: TargetStatistics, factor: HessianFactor, *, share: float
) -> Tensor:
    """T = W + share · (W C) (H + D)⁻¹ or W + share · E (H + D)⁻¹ [out, in], in fp32 at least.

    D is the damping of `factor`. With share 1 and D = 0, T x is the least-squares fit of the dense model's
    W x_dense, or of what it leaves in the residual stream. (GPTAQ, arXiv 2504.02692, has the term W C; the
    term E is ours.)

    weight: W [out, in], any float dtype. statistics: H, and C or E. factor: of H.
    share: the share of the way from W to the fit, in [0, 1].
    """
    hinv = factor.hinv
    target = weight.to(hinv.dtype, copy=True)
    change = statistics.output_change
    if change is None:
        assert statistics.input_change is not None
        change = target @ statistics.input_change
    return target.addmm_(change @ hinv.T, hinv, alpha=share)
