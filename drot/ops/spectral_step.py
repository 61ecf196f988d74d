"""`spectral_step`: one step of a stack of small orthogonal matrices in so(n), in one kernel of a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drot.ops.polar_start import SMALLEST_FOURTH


@torch.no_grad()
def spectral_step(
    q: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    unit: Tensor,
    angle: Tensor,
    decay: float,
    polynomials: Sequence[float],
    margin: float,
) -> None:
    """Replaces q by q + q (½ (1 - qᵀq) + angle[0] J + angle[1] J²).

    For an orthogonal q and J² = -1 that is q exp(-θ J). The term with qᵀq removes what earlier rounding left.

    J approximates the polar factor of u = S + decay · m', with S = qᵀg - gᵀq, g = unit · gradient and the new
    momentum m' = decay · m + S. It is made of the polynomials x (a + b xᵀx + c (xᵀx)²), one after the other.
    The first x is margin · u / ‖u‖; ‖u‖ is the fourth root of the largest row sum of |u⁴|.

    On a GPU products are of bf16 operands with sums in fp32. Their results are rounded to bf16, except S and
    the change of q. u, J and every x between them are skew-symmetric to the last bit. Nothing is read on the
    host, so a CUDA graph can hold the op.

    Args:
        q: [count, n, n] fp32, contiguous, orthogonal but for rounding; it is replaced. n is a multiple of 16,
            at most 128.
        momentum: m [count, n, n] bf16, contiguous. The elements above the diagonal are replaced by those of
            m'. Nothing else of it is read or written: m is skew-symmetric.
        gradient: d loss/d q [count, n, n] fp32.
        unit: factor of the gradient, a tensor [] in fp32.
        angle: [2] fp32, the factors of J and J²: -sin θ and 1 - cos θ.
        decay: the factor of the old momentum.
        polynomials: a, b and c of 1 to 8 polynomials, one after the other; c is at least 0, but in the first.
        margin: upper bound of the norm of the first x, above 0.

    A gradient that is not finite makes the q of its matrix NaN. No result has a gradient. Raises ValueError
    for other shapes, dtypes, strides or numbers.
    """
    torch.ops.drot.spectral_step(q, momentum, gradient, unit, angle, decay, polynomials, margin)


@torch.no_grad()
def spectral_step_ref(
    q: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    unit: Tensor,
    angle: Tensor,
    decay: float,
    polynomials: Sequence[float],
    margin: float,
) -> None:
    """`spectral_step` in plain PyTorch, in place too, without rounding to bf16: in the dtype of q."""
    x = q.mT @ (unit * gradient)
    s = x - x.mT
    old = momentum.triu(1).to(q.dtype)
    new = decay * (old - old.mT) + s
    above = torch.ones_like(momentum, dtype=torch.bool).triu(1)
    momentum.copy_(torch.where(above, new.to(momentum.dtype), momentum))
    u = s + decay * new
    rows = torch.linalg.matrix_power(u, 4).abs().sum(-1, keepdim=True)
    j = margin / rows.amax(-2, keepdim=True).clamp_min(SMALLEST_FOURTH) ** 0.25 * u
    for i in range(0, len(polynomials), 3):
        a, b, c = polynomials[i : i + 3]
        gram = j.mT @ j
        j = a * j + j @ (b * gram + c * (gram @ gram))
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    q += q @ (0.5 * (eye - q.mT @ q) + angle[0] * j + angle[1] * (j @ j))
