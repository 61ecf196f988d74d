"""SparseGPT (Frantar & Alistarh 2023): prune column by column, let the rest make up for it."""

import torch
from torch import Tensor

from drot.calibration.hessian import inverse_factor, mend_dead
from drot.config import Sparsity
from drot.errors import UserError
from drot.ops.sparsegpt_sweep import sparsegpt_sweep
from drot.pruning.masks import check_groups, removed_mask
from drot.pruning.outcome import PruneOutcome, check_finite, output_error


def prune_sparsegpt(
    weight: Tensor, hessian: Tensor, sparsity: Sparsity, *, damping: float, block_size: int
) -> PruneOutcome:
    """SparseGPT of one weight.

    weight: [out, in], any float dtype; hessian: [in, in] ∝ XᵀX, left as it is. Everything is
    computed in fp32 (fp64 for an fp64 Hessian) and rounded once. damping: share of mean(diag H)
    added to the diagonal; the outcome tells which share was used in the end. Columns whose input is
    always 0 are set to 0.

    n:m is chosen inside the sweep, from updated weights. A ratio removes of every block of
    block_size columns the int(rows · columns · ratio) smallest (W_ij / U_jj)², ranked over all rows
    as the block is reached. (The authors' code takes `score <= sorted[int(numel · ratio)]`, one
    weight a block more; we take the number asked for.)
    Raises UserError: values that are not finite, shapes that do not fit, `in` or block_size no
    multiple of m, a Hessian that cannot be factorised.
    """
    columns = weight.shape[1]
    if hessian.shape != (columns, columns):
        raise UserError(
            f"hessian must be [{columns}, {columns}] for a weight of shape {list(weight.shape)}, "
            f"got {list(hessian.shape)}"
        )
    check_groups(weight.shape, sparsity)
    if sparsity.structured and block_size < columns and block_size % sparsity.m:
        raise UserError(f"block_size must be a multiple of m; got {block_size} and {sparsity}")
    check_finite(weight, "weight")
    check_finite(hessian, "hessian")

    dtype = torch.promote_types(hessian.dtype, torch.float32)
    work = weight.to(dtype, copy=True, memory_format=torch.contiguous_format)
    factor = hessian.to(dtype, copy=True)
    work.masked_fill_(mend_dead(factor), 0)
    factor, damping = inverse_factor(factor, damping)

    removed = torch.empty_like(work, dtype=torch.bool)
    prune = sparsity.m - sparsity.n
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        block, block_factor = work[:, start:stop], factor[start:stop, start:stop]
        chosen = None
        if not sparsity.structured:
            score = (block / block_factor.diagonal()) ** 2
            chosen = removed_mask(score, sparsity, scope="matrix")
        pruned, error, mask = sparsegpt_sweep(block, block_factor, chosen, prune, sparsity.m)
        work[:, start:stop] = pruned
        removed[:, start:stop] = mask
        work[:, stop:].addmm_(error, factor[start:stop, stop:], alpha=-1)

    result = work.to(weight.dtype)
    return PruneOutcome(result, removed, damping, output_error(weight, result, hessian))
