"""Retractions: from a step in the tangent space so(n) back to the orthogonal matrices."""

from typing import Literal, get_args

import torch
from torch import Tensor

from drot.ops.batched_qr import batched_qr

Retraction = Literal["cayley", "polar", "qr"]


def retract(q: Tensor, omega: Tensor, method: Retraction = "cayley") -> Tensor:
    """The orthogonal matrix that q reaches by the step omega; all methods agree with q expm(omega)
    to first order, cayley and polar to second.

    q: [..., n, n] orthogonal; omega: [..., n, n] skew-symmetric, same dtype (fp32 or fp64).
    cayley: q (1 - omega/2)⁻¹ (1 + omega/2), one LU solve.
    polar: the orthogonal factor of q (1 + omega), by Newton–Schulz steps: products only.
    qr: the Q of q (1 + omega), Householder.
    One Newton–Schulz step at the end keeps rounding errors from piling up over many steps.
    ValueError on an unknown method or different shapes.
    """
    if method not in get_args(Retraction):
        raise ValueError(f"method must be one of {', '.join(get_args(Retraction))}; got {method!r}")
    if q.shape != omega.shape or q.dim() < 2 or q.shape[-1] != q.shape[-2]:
        raise ValueError(f"q and omega must both be [..., n, n], got {list(q.shape)} and {list(omega.shape)}")
    if q.numel() == 0:
        return q.clone()
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    if method == "cayley":
        moved = q @ torch.linalg.solve(eye - omega / 2, eye + omega / 2)
    elif method == "polar":
        moved = q @ _polar_of_skew(omega, eye)
    else:
        moved, _ = batched_qr(q @ (eye + omega))
    return newton_schulz(moved)


def newton_schulz(x: Tensor) -> Tensor:
    """One step x (3 - xᵀx)/2 towards the orthogonal factor of x [..., n, n]; an error e in the
    singular values becomes 3/2 e². Converges where they lie in (0, √3)."""
    return 1.5 * x - 0.5 * x @ (x.mT @ x)


def _polar_of_skew(omega: Tensor, eye: Tensor) -> Tensor:
    """(1 + omega)(1 - omega²)^(-1/2). The singular values of 1 + omega are √(1 + λ²), so 1 is a
    lower bound, and a norm of omega gives the upper one: nothing else has to be known of it."""
    # |λ| <= the largest absolute row sum; squaring first makes the bound tighter
    squared = omega @ omega
    bound = (1 + squared.abs().sum(-1).amax(-1)).sqrt()[..., None, None]
    x = (eye + omega) / bound
    # a singular value s < 1 grows by 1.5 a step until it is near 1; the last five steps square its error
    largest = float(bound.max())
    steps = 5
    while largest > 1 and 1.5 ** (steps - 5) < largest:
        steps += 1
    for _ in range(steps):
        x = newton_schulz(x)
    return x
