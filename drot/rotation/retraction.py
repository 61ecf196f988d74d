"""Orthogonal matrices: the direction of a step in so(n), the step, and the removal of rounding.

Everything is made of matrix products. `tensor_cores.py` has the same step in bf16.
"""

import math

import torch
from torch import Tensor

#: coefficients a, b, c of x (a + b xᵀx + c (xᵀx)²), which lifts small singular values fast (Jordan et al.
#: 2024, Muon), and the number of these steps: together they lift singular values from about 1/100 of the
#: largest to the range 0.7 to 1.2
QUINTIC, QUINTIC_STEPS = (3.4445, -4.7750, 2.0315), 4
#: steps of `newton_schulz` that then bring this range to within 3 % of 1
CUBIC_STEPS = 2


def polar_of_skew(u: Tensor) -> Tensor:
    """The polar factor u (uᵀu)^(-1/2) of a skew-symmetric u [..., n, n], itself skew-symmetric.

    Odd polynomials of a skew-symmetric matrix are skew-symmetric. Directions in which u is 0, of which an odd
    n always has one, stay 0.
    """
    tiny = torch.finfo(u.dtype).tiny
    x = u / u.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)  # so that no power under- or overflows
    squared = x @ x
    # ‖x⁴‖_F^(1/4) is never below ‖x‖₂: after the division no singular value is above 1
    norm = torch.linalg.matrix_norm(squared @ squared, keepdim=True).sqrt().sqrt()
    norm = torch.where(norm > 0, norm, 1)
    x, squared = x / norm, squared / norm**2
    a, b, c = QUINTIC
    for step in range(QUINTIC_STEPS):
        if step > 0:
            squared = x @ x
        # xᵀx = -x²
        x = a * x + x @ (c * (squared @ squared) - b * squared)
    for _ in range(CUBIC_STEPS):
        x = 1.5 * x + 0.5 * (x @ (x @ x))
    return x


def turn(q: Tensor, j: Tensor, angle: float) -> Tensor:
    """q exp(-angle · j): every direction of a skew-symmetric, orthogonal j turns by the same angle.

    q: [..., n, n] orthogonal; j: [..., n, n] with j² = -1, or 0 in some directions, which then do not turn.
    As j³ = -j, exp(-θ j) = 1 - sin θ · j + (1 - cos θ) · j². The result is orthogonal to rounding.
    """
    moved = q @ j
    q = q - math.sin(angle) * moved + (1 - math.cos(angle)) * (moved @ j)
    gram = q.mT @ q
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return q - 0.5 * (q @ gram)


class SpectralStep:
    """The steps of one stack of orthogonal matrices [..., n, n], with their momentum.

    start: the first matrices.
    decay: factor of the momentum from step to step.
    """

    def __init__(self, start: Tensor, decay: float) -> None:
        self._momentum, self._decay = torch.zeros_like(start), decay

    def __call__(self, q: Tensor, gradient: Tensor, angle: float) -> Tensor:
        """q exp(-angle · J) for the direction J of `gradient`, which is d loss/d q [..., n, n]."""
        s = q.mT @ gradient
        s = s - s.mT
        self._momentum.mul_(self._decay).add_(s)
        return turn(q, polar_of_skew(s.add_(self._momentum, alpha=self._decay)), angle)


def newton_schulz(x: Tensor) -> Tensor:
    """One step x (3 - xᵀx)/2 towards the orthogonal factor of x [..., n, n]; an error e in the
    singular values becomes 3/2 e². Converges where they lie in (0, √3)."""
    return 1.5 * x - 0.5 * x @ (x.mT @ x)


@torch.no_grad()
def reorthogonalize(q: Tensor) -> Tensor:
    """The orthogonal matrix nearest to an almost orthogonal q, in fp64 (Newton–Schulz, two steps)."""
    return newton_schulz(newton_schulz(q.double()))


def orthogonality_error(q: Tensor) -> float:
    """max |QᵀQ − I| over the stack, measured in fp64."""
    q = q.double()
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return float((q.mT @ q - eye).abs().amax())
