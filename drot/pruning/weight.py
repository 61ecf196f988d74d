"""The pruning of one weight by the method and the solver of a recipe."""

from torch import Tensor

from drot.calibration.hessian import InputHessian
from drot.config import PruningConfig
from drot.pruning.magnitude import prune_magnitude
from drot.pruning.result import PruneOutcome
from drot.pruning.solve import solve_kept_weights
from drot.pruning.sparsegpt import prune_sparsegpt
from drot.pruning.wanda import prune_wanda


def prune_weight(
    target: Tensor,
    hessian: InputHessian,
    config: PruningConfig,
    solver: str,
    *,
    total: float | None = None,
) -> PruneOutcome:
    """The pruned weight [out, in] whose outputs are near to those of `target` [out, in].

    solver: `solve` of the recipe, with `auto` resolved.
    total: tr(T H Tᵀ) of the target T; None computes it.
    """
    outcome = prune_once(target, hessian, config, total=total)
    return solve_weight(outcome, target, hessian, config, solver)


def prune_once(
    target: Tensor, hessian: InputHessian | None, config: PruningConfig, *, total: float | None = None
) -> PruneOutcome:
    """The weight [out, in] that the method makes of `target` [out, in], without a solver.

    hessian: None for magnitude, whose outcome then has no output error.
    """
    matrix = None if hessian is None else hessian.matrix
    if config.method == "magnitude":
        return prune_magnitude(target, config.sparsity, hessian=matrix, total=total)
    assert hessian is not None, f"{config.method} needs the Hessian"
    if config.method == "wanda":
        diagonal = hessian.matrix.diagonal()
        return prune_wanda(target, diagonal, config.sparsity, hessian=matrix, total=total)
    assert config.method == "sparsegpt", f"{config.method} has no branch here"
    return _sweep(target, hessian, config, total)


def solve_weight(
    outcome: PruneOutcome, target: Tensor, hessian: InputHessian, config: PruningConfig, solver: str
) -> PruneOutcome:
    """The outcome of `prune_once` with the kept weights that the solver computes.

    Returns `outcome` itself for the solver `none`, and for `sparsegpt` after the method `sparsegpt`.
    """
    if solver == "sparsegpt" and config.method != "sparsegpt":
        return _sweep(target, hessian, config, outcome.energy, outcome.removed)
    if solver in ("pcg", "admm"):
        return solve_kept_weights(
            outcome,
            target,
            hessian.matrix,
            config.sparsity,
            solver=solver,
            damping=hessian.damping if outcome.damping is None else outcome.damping,
            average=hessian.average,
            total=outcome.energy,
        )
    return outcome


def _sweep(
    target: Tensor,
    hessian: InputHessian,
    config: PruningConfig,
    total: float | None,
    removed: Tensor | None = None,
) -> PruneOutcome:
    """SparseGPT's sweep with the factor of the input. removed: the mask of another method, if it is given."""
    return prune_sparsegpt(
        target,
        hessian.matrix,
        config.sparsity,
        damping=hessian.damping,
        block_size=config.block_size,
        removed=removed,
        factor=hessian.factor,
        total=total,
    )
