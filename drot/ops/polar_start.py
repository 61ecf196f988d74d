"""`polar_start`: the first polynomial on the way to a polar factor, scaled by an estimate of the norm."""

import torch
from torch import Tensor

#: Below this norm of u⁴ u counts as 0; the inverse is a number of fp32.
SMALLEST_FOURTH = 1e-34


@torch.no_grad()
def polar_start(squared: Tensor, fourth: Tensor, a: float, b: float, c: float, margin: float) -> Tensor:
    """p with u p = x (a + b xᵀx + c (xᵀx)²) for a skew-symmetric u and x = margin · u / ‖u‖.

    ‖u‖ is the fourth root of the largest row sum of |u⁴|, which is never below ‖u⁴‖₂. As xᵀx = -x², p is
    s (a - b s² u² + c s⁴ u⁴) with s = margin / ‖u‖. Where the row sums are below 1e-34, s is margin · 10^8.5.

    Args:
        squared: u² [count, n, n] in bf16.
        fourth: u⁴ [count, n, n] in bf16.
        a: coefficient of x.
        b: coefficient of x xᵀx.
        c: coefficient of x (xᵀx)².
        margin: upper bound of ‖x‖₂, above 0.

    Returns p [count, n, n] in bf16, computed in fp32 and rounded once. The result has no gradient. Raises
    ValueError for other shapes and dtypes, and for numbers that are not finite.
    """
    return torch.ops.drot.polar_start(squared, fourth, a, b, c, margin)


@torch.no_grad()
def polar_start_ref(squared: Tensor, fourth: Tensor, a: float, b: float, c: float, margin: float) -> Tensor:
    """`polar_start` in plain PyTorch."""
    if squared.numel() == 0:
        return squared.clone()
    rows = fourth.float().abs().sum(-1, keepdim=True)
    s = margin / rows.amax(-2, keepdim=True).clamp_min(SMALLEST_FOURTH).sqrt().sqrt()
    p = c * (s**2 * (s**2 * fourth.float())) - b * (s**2 * squared.float())
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return (s * p).to(squared.dtype)
