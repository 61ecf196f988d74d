"""`sparsegpt_sweep`: one block of columns of SparseGPT (Frantar & Alistarh 2023, algorithm 1)."""

import torch
from torch import Tensor

from drot.ops.nm_mask import nm_mask_ref


def sparsegpt_sweep(
    w: Tensor, hinv: Tensor, removed: Tensor | None, prune: int, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For j = 0 … b - 1: q_j = w_j or 0 (removed), e_j = (w_j - q_j) / U_jj, w[:, j:] -= e_j ⊗ U[j, j:].

    U is Hinv of the paper's code: the upper Cholesky factor of the inverse Hessian, H⁻¹ = UᵀU. Without a
    given mask, the `prune` smallest scores (w_j / U_jj)² of a group are removed. They are computed from the
    updated weights when the sweep reaches the group. If scores are equal, the lowest column is removed first,
    as by `nm_mask`.

    Args:
        w: [r, b], fp32 or fp64: a block of columns of the weight; not changed. Or a batch of weights
            [n, r, b], each with a matrix of `hinv` and of `removed`: the results have its shape.
        hinv: [b, b] in w's dtype: the block of Hinv; only its upper triangle is read.
        removed: bool [r, b], the mask, True where a weight is removed; None: the op chooses the mask.
        prune: weights to remove from each group; ignored for a given mask.
        group: columns of a group, 1 to 32 and a divisor of b; ignored for a given mask.

    Returns the pruned weights [r, b], the errors e [r, b], with which the caller updates the columns right of
    the block, and the mask [r, b], all without a gradient.

    Raises ValueError for other shapes, dtypes or groups, and NotImplementedError in a backward pass.
    """
    return torch.ops.drot.sparsegpt_sweep(w, hinv, removed, prune, group)


def sparsegpt_sweep_ref(
    w: Tensor, hinv: Tensor, removed: Tensor | None, prune: int, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`sparsegpt_sweep` in plain PyTorch, by a loop over columns, with the arguments of that op."""
    if w.dim() == 3:
        masks = [None] * len(w) if removed is None else removed
        of_each = zip(w, hinv, masks, strict=True)
        one, two, three = zip(*(sparsegpt_sweep_ref(*each, prune, group) for each in of_each), strict=True)
        return torch.stack(one), torch.stack(two), torch.stack(three)
    w = w.clone(memory_format=torch.contiguous_format)
    err = torch.zeros_like(w)
    mask = torch.zeros_like(w, dtype=torch.bool) if removed is None else removed.clone()
    diagonal = hinv.diagonal()
    for j in range(w.shape[1]):
        if removed is None and j % group == 0:
            span = slice(j, j + group)
            mask[:, span] = nm_mask_ref((w[:, span] / diagonal[span]) ** 2, prune, group)
        err[:, j] = torch.where(mask[:, j], w[:, j], 0) / diagonal[j]
        w[:, j].masked_fill_(mask[:, j], 0)
        w[:, j + 1 :] -= torch.outer(err[:, j], hinv[j, j + 1 :])
    return w, err, mask
