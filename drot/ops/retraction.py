"""Retractions: from a step in the tangent space so(n) back to the orthogonal matrices.

On a GPU an fp32 step of `polar` is made of products that the tensor cores do: what is added to q in bf16, the
orthogonality that remains in two fp16 halves, which together hold fp32's digits. The step itself is
then good to 8 bits, its result orthogonal to fp32. Nothing waits for the GPU, except where stated.
"""

from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from drot.ops.batched_qr import batched_qr

Retraction = Literal["cayley", "polar", "qr"]
Real = TypeVar("Real", float, Tensor)


def retract(q: Tensor, omega: Tensor, method: Retraction = "cayley", *, steps: int | None = None) -> Tensor:
    """The orthogonal matrix that q reaches by the step omega; all methods agree with q expm(omega)
    to first order, cayley and polar to second.

    q: [..., n, n] orthogonal; omega: [..., n, n] skew-symmetric, same dtype (fp32 or fp64).
    cayley: q (1 - omega/2)⁻¹ (1 + omega/2), one LU solve.
    polar: the orthogonal factor of q (1 + omega), by `steps` Newton–Schulz steps: products only. None
    counts the steps from the norm of omega, for which the host waits; 2 are enough for spectral norms
    up to 0.5, 3 up to 1.3, and with too few the result is not orthogonal.
    qr: the Q of q (1 + omega), Householder.
    What rounding leaves of non-orthogonality is removed at the end, so that many steps do not drift.
    ValueError on an unknown method or different shapes.
    """
    if method not in get_args(Retraction):
        raise ValueError(f"method must be one of {', '.join(get_args(Retraction))}; got {method!r}")
    if q.shape != omega.shape or q.dim() < 2 or q.shape[-1] != q.shape[-2]:
        raise ValueError(f"q and omega must both be [..., n, n], got {list(q.shape)} and {list(omega.shape)}")
    if q.numel() == 0:
        return q.clone()
    if method == "qr":
        eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
        moved, _ = batched_qr(q @ (eye + omega))
    elif method == "polar":
        moved = q + _product(q, _polar_of_skew(omega, steps))
    else:
        moved = q + _product(q, _cayley_of_skew(omega))
    rounds = 2 if method == "polar" or _on_tensor_cores(q) else 1
    for _ in range(rounds):
        moved = moved - 0.5 * _product(moved, _deviation(moved))
    return moved


def newton_schulz(x: Tensor) -> Tensor:
    """One step x (3 - xᵀx)/2 towards the orthogonal factor of x [..., n, n]; an error e in the
    singular values becomes 3/2 e². Converges where they lie in (0, √3)."""
    return 1.5 * x - 0.5 * x @ (x.mT @ x)


def _cayley_of_skew(omega: Tensor) -> Tensor:
    """(1 - omega/2)⁻¹ (1 + omega/2) - 1."""
    # 1 - omega/2 is never singular, and the check of linalg.solve would wait for the GPU
    solved: Tensor = torch.linalg.solve_ex(_plus_diagonal(-0.5 * omega, 1.0), omega)[0]
    return solved


def _polar_of_skew(omega: Tensor, steps: int | None) -> Tensor:
    """(1 + omega)(1 - omega²)^(-1/2) - 1, by Newton–Schulz steps scaled for the fastest convergence
    (Chen & Chow 2014).

    The singular values of 1 + omega are √(1 + λ²): 1 is their lower bound, and a norm of omega gives
    the upper one. The iterate is 1 + d, and only d is stored and multiplied, since it is small.
    """
    squared = _product(omega, omega)
    # the largest absolute row sum of omega² bounds λ²
    upper = (1 + squared.abs().sum(-1).amax(-1)).sqrt()[..., None, None]
    lower = 1 / upper  # of the singular values of (1 + omega) / upper; the largest is 1
    if steps is None:
        steps = _steps_from(float(lower.min()), 1e-2 if omega.dtype == torch.float32 else 1e-4)
    scale = lower
    d = _plus_diagonal(scale * omega, scale - 1)
    # (1 + d)ᵀ(1 + d) - 1
    excess = _plus_diagonal(-scale.square() * squared, scale.square() - 1)
    for step in range(steps):
        if step > 0:
            excess = _product(d.mT, d) + d + d.mT
        rho = _best_scale(lower)
        shrink = 0.5 * rho**3
        grow = 1.5 * rho - shrink
        d = _plus_diagonal(grow * d - shrink * (_product(d, excess) + excess), grow - 1)
        lower = _scaled_step(lower, rho)
    return d


def _best_scale(lower: Real) -> Real:
    """The factor for singular values in [lower, 1] after which both ends arrive at the same value."""
    scale: Real = (3 / (1 + lower + lower * lower)) ** 0.5
    return scale


def _scaled_step(x: Real, rho: Real) -> Real:
    return 1.5 * rho * x - 0.5 * (rho * x) ** 3


def _steps_from(lower: float, tolerance: float) -> int:
    """Steps until every singular value from `lower` to 1 is within `tolerance` of 1."""
    steps = 0
    while 1 - lower > tolerance:
        lower = _scaled_step(lower, _best_scale(lower))
        steps += 1
    return steps


def _plus_diagonal(x: Tensor, value: Tensor | float) -> Tensor:
    """Adds value (a number, or [..., 1, 1]) to the diagonal of x, in place."""
    x.diagonal(dim1=-2, dim2=-1).add_(value.squeeze(-1) if isinstance(value, Tensor) else value)
    return x


def _on_tensor_cores(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, [..., n, n]; on tensor cores with a and b rounded to bf16."""
    return _half_product(a.bfloat16(), b.bfloat16()) if _on_tensor_cores(a) else a @ b


def _deviation(q: Tensor) -> Tensor:
    """qᵀq - 1 to q's own accuracy, for q with elements up to about 1."""
    if _on_tensor_cores(q):
        high = q.half()
        # scaled, so that the second half of the digits does not fall below fp16's range
        low = ((q - high) * 2**11).half()
        mixed = _half_product(high.mT, low) * 2**-11
        gram = _half_product(high.mT, high) + mixed + mixed.mT
    else:
        gram = q.mT @ q
    return _plus_diagonal(gram, -1.0)


def _half_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in fp32, of two fp16 or two bf16 tensors; their products are exact."""
    if not a.is_cuda:
        return a.float() @ b.float()
    n = a.shape[-1]
    return torch.bmm(a.reshape(-1, n, n), b.reshape(-1, n, n), out_dtype=torch.float32).view(a.shape)
