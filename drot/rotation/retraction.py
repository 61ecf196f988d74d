"""Orthogonal matrices: the direction of a step in so(n), the step, and the removal of rounding.

Everything is made of matrix products. `tensor_cores.py` has the same step in bf16.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Coefficients a, b, c of σ (a + b σ² + c σ⁴), applied one after the other; with c = 0 a step is a product
#: less. For singular values σ in [0.01, 1] each is the polynomial nearest to 1 on the range that the steps
#: before it leave, widened by 3 % for rounding (Amsel et al. 2025, Polar Express). Together they bring σ to
#: within 18 % of 1. On a narrower range they would come nearer to 1, but small singular values would fall
#: behind.
STEPS = (
    (7.86899, -21.65823, 15.08082),
    (3.56331, -2.51903, 0.46759),
    (1.97033, -0.53045, 0.0),
    (1.66907, -0.49574, 0.0),
)
#: Steps that then bring σ to within 0.3 % of 1. In bf16 they would only add rounding.
LAST_STEPS = ((1.5, -0.5, 0.0), (1.5, -0.5, 0.0))


def polar_of_skew(u: Tensor) -> Tensor:
    """The polar factor u (uᵀu)^(-1/2) of a skew-symmetric u [..., n, n], itself skew-symmetric.

    Singular values of at least 1/100 of the largest become 1 (STEPS, LAST_STEPS), smaller ones become smaller
    than 1. Odd polynomials of a skew-symmetric matrix are skew-symmetric. Directions in which u is 0, of
    which an odd n always has one, stay 0.
    """
    tiny = torch.finfo(u.dtype).tiny
    x = u / u.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)  # so that no power under- or overflows
    squared = x @ x  # -xᵀx
    fourth = squared @ squared
    # ‖x⁴‖_F^(1/4) is never below ‖x‖₂: after the division no singular value is above 1
    norm = torch.linalg.matrix_norm(fourth, keepdim=True).sqrt().sqrt()
    norm = torch.where(norm > 0, norm, 1)
    a, b, c = STEPS[0]
    x, squared, fourth = x / norm, squared / norm**2, fourth / norm**4
    x = a * x + x @ (c * fourth - b * squared)
    for a, b, c in (*STEPS[1:], *LAST_STEPS):
        squared = x @ x
        x = a * x + x @ (c * (squared @ squared) - b * squared if c else -b * squared)
    return x


def turn(q: Tensor, j: Tensor, angle: float) -> Tensor:
    """q exp(-angle · j): every direction of a skew-symmetric, orthogonal j turns by the same angle.

    q: [..., n, n] orthogonal; j: [..., n, n] with j² = -1, or 0 in some directions, which then do not turn.
    As j³ = -j, exp(-θ j) = 1 - sin θ · j + (1 - cos θ) · j². The result is orthogonal to rounding.

    A direction in which a skew-symmetric j has a norm below 1 turns by less. The formula then adds at most
    (1 - cos θ)²/4 to qᵀq; the correction removes that to first order, and leaves about θ⁸/340.
    """
    moved = q @ j
    q = q - math.sin(angle) * moved + (1 - math.cos(angle)) * (moved @ j)
    gram = q.mT @ q
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return q - 0.5 * (q @ gram)


@dataclass(frozen=True)
class Direction:
    """How the direction J of a step follows from the skew-symmetric gradients S of the steps so far.

    With m ← momentum · m + S, J is the polar factor of S + momentum · m (Nesterov), or, with `squares`,
    Adam's m/√v for v ← squares · v + S², scaled to a norm of at most 1. Every J has a norm of at most 1.
    """

    momentum: float
    squares: float | None = None


#: Objective → the direction of its steps. On the entropy of layers of a wider model Adam's direction ends up
#: to a tenth lower (benchmarks/README.md).
DIRECTIONS = {"pruned": Direction(0.9), "entropy": Direction(0.9, squares=0.95)}


class SpectralStep:
    """Steps of bounded spectral norm of one stack of orthogonal matrices [..., n, n], with their moments."""

    def __init__(self, start: Tensor, direction: Direction) -> None:
        self._direction = direction
        self._momentum = torch.zeros_like(start)
        self._squares = None if direction.squares is None else torch.zeros_like(start)
        self._unit: Tensor | None = None

    def __call__(self, q: Tensor, gradient: Tensor, angle: float) -> None:
        """Replaces q by q exp(-angle · J) for the direction J of `gradient`, d loss/d q [..., n, n]."""
        s = q.mT @ gradient
        s = s - s.mT
        momentum, squares = self._direction.momentum, self._direction.squares
        if squares is None or self._squares is None:
            self._momentum.mul_(momentum).add_(s)
            j = polar_of_skew(s.add_(self._momentum, alpha=momentum))
        else:
            if self._unit is None:
                self._unit = unit_of(gradient)
            s *= self._unit
            self._momentum.mul_(momentum).add_(s)
            self._squares.mul_(squares).addcmul_(s, s)
            j = scaled_to_one(torch.where(self._squares > 0, self._momentum / self._squares.sqrt(), 0))
        q.copy_(turn(q, j, angle))


def unit_of(gradient: Tensor) -> Tensor:
    """The factor (0-dim) that brings the largest element of a first gradient to 1, so that no power of an
    element under- or overflows."""
    return torch.nan_to_num(1 / gradient.abs().amax(), posinf=1.0)


def scaled_to_one(a: Tensor) -> Tensor:
    """A skew-symmetric a [..., n, n] over the fourth root of the largest row sum of |a⁴|; zeros stay zeros.

    The root is at least the spectral norm of a and at most n^(1/8) times the norm: 2.8 times for n = 4096.
    """
    squared = a @ a
    norm = (squared @ squared).abs().sum(-1, keepdim=True).amax(-2, keepdim=True).sqrt().sqrt()
    return a / torch.where(norm > 0, norm, 1)
