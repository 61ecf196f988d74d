"""The best values of the kept weights: masked conjugate gradients, and ADMM, which moves the mask too.

For a target weight T [out, in] and a mask, both minimise E(Ŵ) = tr((Ŵ - T) H (Ŵ - T)ᵀ), the squared error of
the linear's outputs, where H ∝ XᵀX. SparseGPT computes the kept weights in one sweep over the columns, which
is not the minimum. All rows are solved at once by products with H, and every row has its own step sizes.
"""

import torch
from torch import Tensor

from drot.calibration.cholesky import cholesky_, inverse_of_factor_
from drot.calibration.hessian import damping_unit, fix_dead_columns
from drot.config import Sparsity
from drot.machine.finite import check_finite
from drot.pruning.masks import removed_mask
from drot.pruning.result import PruneOutcome, with_output_error

#: iterations of the conjugate gradients
PCG_ITERATIONS = 20
#: most iterations of ADMM; the mask usually stops moving after 30 to 60
ADMM_ITERATIONS = 100
#: penalty ρ of the first iteration, for a Hessian with ones on its diagonal
ADMM_PENALTY = 0.1
#: iterations between two changes of ρ
ADMM_INTERVAL = 3
#: share of the kept weights that moved in ADMM_INTERVAL iterations → factor of ρ (ALPS, alps.py)
ADMM_GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))


def solve_kept_weights(
    outcome: PruneOutcome,
    target: Tensor,
    hessian: Tensor,
    sparsity: Sparsity,
    *,
    solver: str,
    damping: float,
    average: str = "mean",
    total: float | None = None,
) -> PruneOutcome:
    """The outcome with better kept weights, and with `admm` also with a better mask.

    Weights whose error would not become smaller stay as they are, row by row for n:m. So E of the result is
    never above E of `outcome`, but for the rounding to the dtype of the weight.

    Raises UserError for values that are not finite.

    outcome: a pruned weight [out, in]. Its weights are the start, its mask the first mask.
    target: T [out, in], any float dtype.
    hessian: H [in, in], proportional to XᵀX; not changed.
    sparsity: of the mask of `admm`. solver: `pcg` or `admm`.
    damping: what is added to the diagonal, in units of `damping_unit` for `average`.
    total: tr(T H Tᵀ), where it is known.
    """
    assert solver in ("pcg", "admm"), f"{solver} is no solver"
    check_finite(target, "target")
    check_finite(hessian, "hessian")
    dtype = torch.promote_types(hessian.dtype, torch.float32)
    damped = hessian.to(dtype, copy=True)
    added = damping * damping_unit(damped.diagonal(), average)
    fix_dead_columns(damped)
    damped.diagonal().add_(added)
    # scaled to a diagonal of ones: the preconditioner of the conjugate gradients, and the unit of ρ
    scale = damped.diagonal().sqrt()
    damped.div_(scale).div_(scale[:, None])
    wanted = target.to(dtype) * scale
    start = outcome.weight.to(dtype) * scale
    removed = outcome.removed
    products = torch.bfloat16 if damped.is_cuda and dtype == torch.float32 else dtype
    best = _conjugate_gradients(start, wanted, damped, ~removed, products)
    best, _ = _better((start, removed), (best, removed), wanted, damped, by_row=True)
    iterations = 0
    if solver == "admm":
        moved, mask, iterations = _admm(best, wanted, damped, sparsity)
        moved = _conjugate_gradients(moved, wanted, damped, ~mask, products)
        # the rows of two masks may have different numbers of weights, unless the mask is n:m
        by_row = sparsity.structured
        best, removed = _better((best, removed), (moved, mask), wanted, damped, by_row=by_row)
    weight = (best / scale).to(outcome.weight.dtype)
    solved = PruneOutcome(weight, removed, outcome.damping, energy=total, admm_iterations=iterations)
    return with_output_error(solved, target, hessian)


def _conjugate_gradients(
    start: Tensor, target: Tensor, hessian: Tensor, kept: Tensor, products: torch.dtype
) -> Tensor:
    """Ŵ [out, in] with Ŵ = 0 outside of `kept` that minimises E, by conjugate gradients in every row.

    The gradient of a row's error in its kept weights is 2 ((Ŵ - T) H) ∘ kept, and the row's matrix is the
    kept part of H. A row that has converged stays as it is, because its step is 0.

    products: dtype of the products with H inside the iterations. The first residual is in the dtype of H, so
        that bf16 products end within 3 % of the least E (tests/pruning/test_solve.py).
    """
    solution = start * kept
    residual = ((target - solution) @ hessian) * kept
    direction = residual.clone()
    square = residual.square().sum(1, keepdim=True)
    matrix = hessian.to(products)
    for _ in range(PCG_ITERATIONS):
        product = (direction.to(products) @ matrix).to(solution.dtype) * kept
        curvature = (direction * product).sum(1, keepdim=True)
        step = torch.where(curvature > 0, square / curvature, 0)
        solution.addcmul_(direction, step)
        residual.addcmul_(product, step, value=-1)
        new_square = residual.square().sum(1, keepdim=True)
        direction = residual + torch.where(square > 0, new_square / square, 0) * direction
        square = new_square
    return solution


def _admm(start: Tensor, target: Tensor, hessian: Tensor, sparsity: Sparsity) -> tuple[Tensor, Tensor, int]:
    """ADMM over weight and mask (ALPS, arXiv 2406.07831, algorithm 1).

    Returns Ŵ [out, in], its `removed` and the number of iterations.

    B = (H + ρI)⁻¹ (H T - V + ρ D), D = P(B + V/ρ), V ← V + ρ (B - D), where P keeps the largest weights that
    the sparsity allows. ρ grows as long as the mask moves.
    """
    inverse = _shifted_inverse(hessian, ADMM_PENALTY)
    projected, dual, penalty = start, torch.zeros_like(start), ADMM_PENALTY
    right = target @ hessian
    removed = before = start == 0
    for iteration in range(1, ADMM_ITERATIONS + 1):
        free = (right - dual + penalty * projected) @ inverse
        candidate = free + dual / penalty
        removed = removed_mask(candidate.abs(), sparsity, scope="matrix")
        projected = torch.where(removed, 0, candidate)
        dual = dual + penalty * (free - projected)
        if iteration % ADMM_INTERVAL == 0:
            moved = float((removed != before).float().mean()) / max(1 - sparsity.ratio, 1e-9)
            if moved == 0:
                break
            penalty *= next(factor for share, factor in ADMM_GROWTH if moved > share)
            before = removed
            del inverse  # before the next: of a down_proj it is the largest matrix
            inverse = _shifted_inverse(hessian, penalty)
    return projected, removed, iteration


def _shifted_inverse(hessian: Tensor, shift: float) -> Tensor:
    """(H + shift · I)⁻¹"""
    shifted = hessian.clone()
    shifted.diagonal().add_(shift)
    if not cholesky_(shifted):
        raise torch.linalg.LinAlgError("the Hessian of ADMM has no Cholesky factor")
    inverse_of_factor_(shifted)
    return shifted


def _better(
    old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], target: Tensor, hessian: Tensor, *, by_row: bool
) -> tuple[Tensor, Tensor]:
    """The pair (weight, removed) with the smaller error, chosen for each row or for the whole matrix."""
    errors = [(((weight - target) @ hessian) * (weight - target)).sum(1) for weight, _ in (old, new)]
    if not by_row:
        errors = [error.sum() for error in errors]
    better = (errors[1] < errors[0]).reshape(-1, 1)  # False for NaN
    return torch.where(better, new[0], old[0]), torch.where(better, new[1], old[1])
