"""`sparsegpt_sweep`: one block of columns of SparseGPT (Frantar & Alistarh 2023, algorithm 1)."""

import torch
from torch import Tensor

from drot.ops.nm_mask import nm_mask_ref


def sparsegpt_sweep(
    w: Tensor, hinv: Tensor, removed: Tensor | None, prune: int, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Prunes one block of columns from left to right, each error spread over the columns to come.

    w: [r, b] fp32 or fp64; hinv: [b, b] in w's dtype, the block's part of the upper Cholesky factor
    U of H^-1 = UᵀU, of which only the upper triangle is read. removed: bool [r, b], the mask, and
    prune and group are ignored; or None: then at each group start i the `prune` smallest of
    (w_j / U_jj)², j in i … i + group - 1, go, taken from the weights as updated so far, by the rule
    of ties of `nm_mask`; group is 1 to 32 and divides b.
    Column j leaves the error e_j = (w_j - q_j) / U_jj, and w[:, j:] -= e_j ⊗ U[j, j:].
    Returns the pruned weights [r, b], the errors [r, b], with which the caller updates the columns
    right of the block, and the mask [r, b]; none has a gradient. w and removed stay as they are.
    Raises ValueError for other shapes or dtypes, and a group that does not divide b.
    """
    return torch.ops.drot.sparsegpt_sweep(w, hinv, removed, prune, group)


@torch.library.register_fake("drot::sparsegpt_sweep")
def _(
    w: Tensor, hinv: Tensor, removed: Tensor | None, prune: int, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    return w.new_empty(w.shape), w.new_empty(w.shape), w.new_empty(w.shape, dtype=torch.bool)


def _refuse_backward(ctx: object, *grads: Tensor | None) -> None:
    raise NotImplementedError("sparsegpt_sweep has no gradient: pass w.detach() and hinv.detach()")


torch.library.register_autograd("drot::sparsegpt_sweep", _refuse_backward)


def sparsegpt_sweep_ref(
    w: Tensor, hinv: Tensor, removed: Tensor | None, prune: int, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch form of `sparsegpt_sweep`: the loop over columns."""
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
