"""The best values of the kept weights: masked conjugate gradients, and ADMM, which moves the mask too.

For a target weight T [out, in] and a mask, both minimise E(Ŵ) = tr((Ŵ - T) H (Ŵ - T)ᵀ), the squared error of
the linear's outputs, where H ∝ XᵀX. SparseGPT computes the kept weights in one sweep over the columns, which
is not the minimum. The linears of an input group share H: their rows are stacked and solved at once, by
products with H. In the conjugate gradients every row has its own step sizes; in ADMM all have one penalty.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from drot.calibration.hessian import (
    InputHessian,
    as_scalar,
    damping_unit,
    diagonal_of,
    energy_of_rows,
    fix_dead_columns,
    sum_of_rows,
)
from drot.config import Sparsity
from drot.machine.devices import is_gpu
from drot.machine.finite import check_finite
from drot.machine.products import add_product
from drot.machine.ranks import ALONE, Ranks
from drot.pruning.masks import removed_mask
from drot.pruning.result import PruneOutcome, with_output_error
from drot.pruning.shifted_inverse import ShiftedInverse

#: iterations of the conjugate gradients: on the mask of a method, and after ADMM, which ends near the least E
PCG_ITERATIONS, PCG_ITERATIONS_AFTER_ADMM = 20, 10
#: most iterations of ADMM; the mask usually stops moving after 20 to 28
ADMM_ITERATIONS = 100
#: penalty ρ of the first iteration, for a Hessian with ones on its diagonal
ADMM_PENALTY = 0.3
#: iterations between two changes of ρ, each of which takes another inverse
ADMM_INTERVAL = 4
#: share of the kept weights that moved in ADMM_INTERVAL iterations → factor of ρ (ALPS, alps.py)
ADMM_GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))
#: the same share, at which ADMM ends
ADMM_SETTLED = 1e-3


def products_on(device: torch.device) -> torch.dtype:
    """The dtype of the products in the iterations, for a Hessian in fp32."""
    return torch.bfloat16 if is_gpu(device) else torch.float32


def solve_kept_weights(
    outcomes: Sequence[PruneOutcome],
    targets: Sequence[Tensor],
    hessian: InputHessian,
    sparsities: Sequence[Sparsity],
    *,
    solver: str,
    ranks: Ranks = ALONE,
) -> list[PruneOutcome]:
    """The outcomes of an input group with better kept weights, and with `admm` also with better masks.

    Weights whose error would not become smaller stay as they are, row by row for n:m. So E of a result is
    never above E of its outcome, but for the rounding to the dtype of the weight.

    Raises UserError for a Hessian that is not finite.

    outcomes: the pruned weights [..., out, in]. Their weights are the start, their masks the first masks.
    targets: T [..., out, in] of each, any float dtype, which the methods have found finite.
    hessian: H [..., in, in], proportional to XᵀX; not changed. It is damped as it was for the outcomes.
    sparsities: of the masks of `admm`. solver: `pcg` or `admm`.
    ranks: those that hold the other rows of each weight.
    """
    assert solver in ("pcg", "admm"), f"{solver} is no solver"
    check_finite(hessian.matrix, "hessian")
    dtype = torch.promote_types(hessian.matrix.dtype, torch.float32)
    damped = hessian.matrix.to(dtype, copy=True)
    damping = outcomes[0].damping  # None for a method that inverts no Hessian
    damping = as_scalar(hessian.damping if damping is None else damping, damped)
    added = damping * damping_unit(diagonal_of(damped), hessian.average)
    fix_dead_columns(damped)
    diagonal_of(damped).add_(added[..., None])
    # scaled to a diagonal of ones: the preconditioner of the conjugate gradients, and the unit of ρ
    scale = diagonal_of(damped).sqrt()[..., None, :]
    damped.div_(scale).div_(scale.mT)
    wanted = torch.cat([target.to(dtype) for target in targets], -2).mul_(scale)
    start = torch.cat([outcome.weight.to(dtype) for outcome in outcomes], -2).mul_(scale)
    removed = torch.cat([outcome.removed for outcome in outcomes], -2)
    parts = _Parts([target.shape[-2] for target in targets], sparsities, ranks)
    products = products_on(damped.device) if dtype == torch.float32 else dtype
    iterations: int | Tensor = 0
    if solver == "admm":
        moved, mask, iterations = _admm(start, removed, wanted, damped, parts, products)
        moved = _conjugate_gradients(moved, wanted, damped, ~mask, products, PCG_ITERATIONS_AFTER_ADMM)
    else:
        moved, mask = _conjugate_gradients(start, wanted, damped, ~removed, products, PCG_ITERATIONS), removed
    better = parts.better(start, moved, wanted, damped)
    del wanted, damped
    weight = torch.where(better, moved, start).div_(scale)
    removed = torch.where(better, mask, removed)
    del start, moved, mask
    return [
        with_output_error(
            PruneOutcome(
                weight[..., rows, :].to(outcome.weight.dtype),
                removed[..., rows, :],
                outcome.damping,
                admm_iterations=iterations,
            ),
            target,
            hessian.matrix,
            outcome.energy,
            ranks,
        )
        for rows, outcome, target in zip(parts.rows, outcomes, targets, strict=True)
    ]


class _Parts:
    """The linears of a group as parts of the stacked rows.

    rows: the rows of each linear. ranks: those that hold its other rows.
    """

    def __init__(self, counts: Sequence[int], sparsities: Sequence[Sparsity], ranks: Ranks = ALONE) -> None:
        starts = itertools.accumulate(counts, initial=0)
        self.rows = [slice(start, start + count) for start, count in zip(starts, counts, strict=False)]
        self._sparsities, self.ranks = sparsities, ranks

    def mask(self, score: Tensor) -> Tensor:
        """What each linear removes, bool [..., Σ out, in]."""
        parts = zip(self.rows, self._sparsities, strict=True)
        return torch.cat(
            [removed_mask(score[..., rows, :], one, scope="matrix", ranks=self.ranks) for rows, one in parts],
            -2,
        )

    def better(self, old: Tensor, new: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
        """Whether E of `new` is smaller than E of `old`, bool [..., Σ out, 1].

        It is so for whole linears with a ratio, because the rows of two masks may then differ in their
        numbers of weights.
        """
        before, after = (energy_of_rows(weight - target, hessian) for weight in (old, new))
        for rows, sparsity in zip(self.rows, self._sparsities, strict=True):
            if not sparsity.structured:
                for errors in (before, after):
                    total = sum_of_rows(errors[..., rows], self.ranks)
                    errors[..., rows] = total[..., None] if isinstance(total, Tensor) else total
        return (after < before)[..., None]  # False for NaN


def _conjugate_gradients(
    start: Tensor, target: Tensor, hessian: Tensor, kept: Tensor, products: torch.dtype, iterations: int
) -> Tensor:
    """Ŵ [..., out, in] with Ŵ = 0 outside of `kept` that minimises E, by conjugate gradients in every row.

    The gradient of a row's error in its kept weights is 2 ((Ŵ - T) H) ∘ kept, and the row's matrix is the
    kept part of H. A row that has converged stays as it is, because its step is 0.

    products: dtype of the products with H inside the iterations. The first residual is in the dtype of H, so
        that bf16 products end within 3 % of the least E (tests/pruning/test_solve.py).
    """
    solution = start * kept
    residual = ((target - solution) @ hessian).mul_(kept)
    direction = residual.clone()
    square = residual.square().sum(-1, keepdim=True)
    matrix = hessian.to(products)
    for _ in range(iterations):
        product = (direction.to(products) @ matrix).to(solution.dtype).mul_(kept)
        curvature = (direction * product).sum(-1, keepdim=True)
        step = torch.where(curvature > 0, square / curvature, 0)
        solution.addcmul_(direction, step)
        residual.addcmul_(product, step, value=-1)
        new_square = residual.square().sum(-1, keepdim=True)
        direction.mul_(torch.where(square > 0, new_square / square, 0)).add_(residual)
        square = new_square
    return solution


def _admm(
    start: Tensor, removed: Tensor, target: Tensor, hessian: Tensor, parts: _Parts, products: torch.dtype
) -> tuple[Tensor, Tensor, int | Tensor]:
    """ADMM over weight and mask (ALPS, arXiv 2406.07831, algorithm 1).

    Returns Ŵ [..., out, in], its `removed` and the number of iterations. Each matrix of a batch has its own ρ
    and its own end. A matrix that has ended is computed on with the others, and what it was then is returned.

    B = (H + ρI)⁻¹ (T H - V + ρ D), Z = B + V/ρ, D = P(Z), V = ρ (Z - D), where P keeps the largest weights
    that the sparsity allows. ρ grows as long as the mask moves. D and V/ρ are the kept and the removed
    weights of Z. With R, which is Z with the removed weights negated, B = T + (R - T) ρ(H + ρI)⁻¹. The last
    matrix has no eigenvalue above 1, and R - T is of the size of the weights: so the product may be in bf16,
    where one with T H may not.

    The first V is the gradient (T - D) H of the removed weights, with which D is a fixed point of a mask that
    does not move.

    products: dtype of the products inside the iterations.
    """
    penalty = torch.full(hessian.shape[:-2], ADMM_PENALTY, dtype=torch.float64)
    iterations = torch.zeros_like(penalty, dtype=torch.int64)  # 0: not yet at its end
    ended: list[tuple[Tensor, Tensor, Tensor]] = []
    gradient = (target - start).mul_(1 / ADMM_PENALTY) @ hessian
    state = torch.where(removed, gradient, start)
    del gradient
    inverse = ShiftedInverse(hessian, penalty, products, parts.ranks)
    before = removed
    for iteration in range(1, ADMM_ITERATIONS + 1):
        change = torch.where(removed, -state, state).sub_(target).to(products)
        state.mul_(removed).add_(target)
        add_product(state, change, inverse.matrix)
        removed = parts.mask(state.abs())
        if iteration % ADMM_INTERVAL == 0 and iteration < ADMM_ITERATIONS:
            moved = _share_moved(removed, before, parts.ranks)
            settled = (moved <= ADMM_SETTLED) & (iterations == 0)
            if iterations.masked_fill_(settled, iteration).all():
                break
            if settled.any():
                places = settled.nonzero()[:, 0].to(state.device)
                ended.append((places, state[places], removed[places]))
            factor = torch.full_like(moved, ADMM_GROWTH[-1][1])
            for share, growth in reversed(ADMM_GROWTH[:-1]):
                factor.masked_fill_(moved > share, growth)
            state.div_(torch.where(removed, factor[..., None, None].to(state), 1.0))
            before = removed
            inverse.grow(factor)
    for places, of_state, of_removed in ended:
        state[places], removed[places] = of_state, of_removed
    iterations.masked_fill_(iterations == 0, iteration)
    return state.mul_(~removed), removed, iterations if iterations.dim() else int(iterations)


def _share_moved(removed: Tensor, before: Tensor, ranks: Ranks) -> Tensor:
    """The share of the kept weights that moved, fp64 [...] in main memory."""
    sums = torch.stack([mask.sum((-2, -1), dtype=torch.float64) for mask in (removed != before, ~removed)])
    ranks.add_(sums)
    changed, kept = sums.cpu()
    return changed / kept.clamp_min(1.0)
