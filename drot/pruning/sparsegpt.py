"""SparseGPT (Frantar & Alistarh 2023): prunes column by column and updates the columns right of it."""

import torch
from torch import Tensor

from drot.calibration.hessian import InputHessian, Scalar, diagonal_of, energy, sum_of_rows
from drot.config import Sparsity
from drot.machine.finite import check_finite
from drot.machine.products import add_product, fp32_products
from drot.machine.ranks import ALONE, Ranks
from drot.ops.sparsegpt_sweep import sparsegpt_sweep
from drot.pruning.masks import removed_mask
from drot.pruning.result import PruneOutcome, relative_error


def prune_sparsegpt(
    weight: Tensor,
    hessian: InputHessian,
    sparsity: Sparsity,
    *,
    block_size: int,
    removed: Tensor | None = None,
    total: Scalar | None = None,
    ranks: Ranks = ALONE,
) -> PruneOutcome:
    """Removes weights with small scores (W_ij / U_jj)², where U is Hinv, and updates the others.

    For n:m, `sparsegpt_sweep` chooses the mask from the updated weights. For a ratio, the mask of a block is
    chosen over all its rows when the block is reached: it removes the int(rows · columns · ratio) smallest
    scores. (The authors' code removes one weight more in each block, with `score <= sorted[int(numel ·
    ratio)]`.) The weights of dead columns, whose input is always 0, are set to 0. The result is computed in
    fp32 (fp64 for an fp64 Hessian) and rounded once. On a GPU the update of the columns right of a block
    takes its fp32 factors in TF32 (benchmarks/README.md).

    The errors e of the sweep are (W - Ŵ) = E U, so Σ e² = tr((W - Ŵ) (H + λ·unit·I) (W - Ŵ)ᵀ). The output
    error of the result is without damping: λ·unit·‖W - Ŵ‖² is subtracted. It is that of the weights before
    they are rounded.

    Raises UserError for values that are not finite, and for a Hessian that cannot be factorised.

    weight: [..., out, in], any float dtype.
    hessian: H [..., in, in], proportional to XᵀX; not changed. The result holds the λ of its factor.
    block_size: the number of columns that are pruned before the columns right of them are updated, a multiple
        of m in n:m.
    removed: bool [..., out, in], the mask of another method, for which the kept weights are updated.
    total: tr(W H Wᵀ), where it is known.
    ranks: those that prune the other rows.
    """
    check_finite(weight, "weight")
    factor = hessian.factor
    hinv = factor.hinv
    work = weight.to(hinv.dtype, copy=True, memory_format=torch.contiguous_format)
    dead_columns = factor.dead_columns[..., None, :]
    work.masked_fill_(dead_columns, 0)
    lost = torch.zeros(work.shape[:-1], dtype=torch.float64, device=work.device)

    given, removed = removed, torch.empty_like(work, dtype=torch.bool)
    prune = sparsity.m - sparsity.n
    columns = weight.shape[-1]
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        block, block_hinv = work[..., start:stop], hinv[..., start:stop, start:stop]
        mask = None if given is None else given[..., start:stop].contiguous()
        if mask is None and not sparsity.structured:
            score = (block / diagonal_of(block_hinv)[..., None, :]) ** 2
            mask = removed_mask(score, sparsity, scope="matrix", ranks=ranks)
        work[..., start:stop], error, removed[..., start:stop] = sparsegpt_sweep(
            block, block_hinv, mask, prune, sparsity.m
        )
        with fp32_products("tf32"):
            add_product(work[..., stop:], error, hinv[..., start:stop, stop:], alpha=-1)
        # row by row: the order of a sum over the whole matrix would depend on the number of threads
        lost += error.square_().sum(-1, dtype=torch.float64)

    result = work.to(weight.dtype)
    change = (weight - work).masked_fill_(dead_columns, 0)
    lost -= factor.added[..., None] * change.square_().sum(-1, dtype=torch.float64)
    if total is None:
        total = energy(weight, hessian.matrix.to(hinv.dtype), ranks)
    relative = relative_error(sum_of_rows(lost, ranks), total)
    return PruneOutcome(result, removed, factor.damping, relative, total)
