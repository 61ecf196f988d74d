"""The pruning of one weight by the method and the solver of a recipe, and towards the dense model."""

from collections.abc import Sequence

from torch import Tensor

from drot.calibration.hessian import HessianFactor, InputHessian, Scalar, diagonal_of
from drot.calibration.layer_pass import TargetStatistics
from drot.config import PruningConfig
from drot.machine.ranks import ALONE, Ranks
from drot.pruning.magnitude import prune_magnitude
from drot.pruning.result import PruneOutcome, with_output_error
from drot.pruning.solve import solve_kept_weights
from drot.pruning.sparsegpt import prune_sparsegpt
from drot.pruning.wanda import prune_wanda


def prune_once(
    target: Tensor,
    hessian: InputHessian | None,
    config: PruningConfig,
    *,
    total: Scalar | None = None,
    ranks: Ranks = ALONE,
) -> PruneOutcome:
    """The weight [..., out, in] that the method makes of `target` [..., out, in], without a solver.

    hessian: None for magnitude, whose outcome then has no output error.
    total: tr(T H Tᵀ) of the target T; None computes it.
    ranks: those that prune the other rows of the weight.
    """
    if config.method == "magnitude":
        outcome = prune_magnitude(target, config.sparsity, ranks=ranks)
        if hessian is None:
            return outcome
    else:
        assert hessian is not None, f"{config.method} needs the Hessian"
        if config.method == "sparsegpt":
            block = config.block_size
            return prune_sparsegpt(
                target, hessian, config.sparsity, block_size=block, total=total, ranks=ranks
            )
        assert config.method == "wanda", f"{config.method} has no branch here"
        outcome = prune_wanda(target, diagonal_of(hessian.matrix), config.sparsity)
    return with_output_error(outcome, target, hessian.matrix, total, ranks)


def solve_weights(
    outcomes: Sequence[PruneOutcome],
    targets: Sequence[Tensor],
    hessian: InputHessian,
    configs: Sequence[PruningConfig],
    solver: str,
    ranks: Ranks = ALONE,
) -> list[PruneOutcome]:
    """The outcomes of `prune_once` for linears that read one input, with what the solver computes.

    Returns the outcomes themselves for the solver `none`, and for `sparsegpt` after the method `sparsegpt`.

    ranks: those that hold the other rows of each weight.
    """
    if solver == "sparsegpt":
        return [
            outcome
            if config.method == "sparsegpt"
            else prune_sparsegpt(
                target,
                hessian,
                config.sparsity,
                block_size=config.block_size,
                removed=outcome.removed,
                total=outcome.energy,
                ranks=ranks,
            )
            for outcome, target, config in zip(outcomes, targets, configs, strict=True)
        ]
    if solver not in ("pcg", "admm"):
        return list(outcomes)
    sparsities = [config.sparsity for config in configs]
    return solve_kept_weights(outcomes, targets, hessian, sparsities, solver=solver, ranks=ranks)


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
