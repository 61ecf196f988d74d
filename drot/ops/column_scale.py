"""`column_scale`: the column scales of a product P = U R; `column_scale_backward`: the way back to P."""

import torch
from torch import Tensor


@torch.no_grad()
def column_scale(product: Tensor, inverse: bool) -> Tensor:
    """q [count, n] with q_j = Σ_i P_ij², or 1/q if `inverse`.

    For P = U R and M = UᵀU, q is the diagonal of RᵀMR.

    product: P [count, rows, n] in bf16.
    inverse: whether 1/q is returned; it is inf where q is 0.

    The result is in fp32. The sums have a fixed order, so that the bytes do not depend on the number of
    threads, and on a GPU the op is one kernel. A NaN or inf in a column of P stays in the q of this column.
    The result has no gradient: `column_scale_backward` has it. Raises ValueError for other shapes and dtypes.
    """
    return torch.ops.drot.column_scale(product, inverse)


@torch.no_grad()
def column_scale_backward(product: Tensor, value: Tensor, gradient: Tensor, inverse: bool) -> Tensor:
    """P diag(d) [count, rows, n] with d = d loss/d q, so that d loss/d R is 2 Uᵀ P diag(d) for P = U R.

    d is `gradient`, or -gradient · value² if `inverse`.

    product: P [count, rows, n] in bf16.
    value: the result [count, n] of `column_scale`, in fp32.
    gradient: d loss/d value [count, n], in fp32.
    inverse: as in `column_scale`.

    The result is in bf16, computed in fp32 and rounded once; on a GPU the op is one kernel. The result has no
    gradient. Raises ValueError for other shapes and dtypes.
    """
    return torch.ops.drot.column_scale_backward(product, value, gradient, inverse)


@torch.no_grad()
def column_scale_ref(product: Tensor, inverse: bool) -> Tensor:
    """`column_scale` in plain PyTorch; in fp64 for a product in fp64."""
    q = product.to(torch.promote_types(product.dtype, torch.float32)).square().sum(1)
    return q.reciprocal() if inverse else q


@torch.no_grad()
def column_scale_backward_ref(product: Tensor, value: Tensor, gradient: Tensor, inverse: bool) -> Tensor:
    """`column_scale_backward` in plain PyTorch."""
    d = -(gradient * value) * value if inverse else gradient
    return (product.to(d.dtype) * d[:, None, :]).to(product.dtype)
