"""A step in bf16, for a GPU: the same step as `retraction.py`, made of products on tensor cores.

A direction in so(n) and the turn along it are good to 8 bits. What rounding leaves of qᵀq - 1, about 1e-3, is
measured in the next step and removed there, so it does not add up from step to step. It is not larger than
what the rounding of q for the products of the loss leaves. Sums are added in fp32 inside the products. No
function reads a value on the host.
"""

import math

import torch
from torch import Tensor

from drot import ops
from drot.machine.products import add_product, identity_plus_product
from drot.rotation.retraction import STEPS, Direction, unit_of


def on_tensor_cores(x: Tensor) -> bool:
    """Whether steps of x are computed in bf16: fp32 on a GPU."""
    return x.device.type != "cpu" and x.dtype == torch.float32


#: STEPS as ops.spectral_step takes them.
POLYNOMIALS = [coefficient for step in STEPS for coefficient in step]
#: The largest matrices whose step is one kernel (ops.spectral_step).
SMALL = 128
#: The share of the range of STEPS that is used. At its end the first polynomials multiply rounding errors.
MARGIN = 0.95


def angles(thetas: list[float], device: torch.device) -> Tensor:
    """The factors of j and j² in `turn` for each angle θ [steps, 2]: -sin θ and 1 - cos θ."""
    pairs = [(-math.sin(theta), 1 - math.cos(theta)) for theta in thetas]
    return torch.tensor(pairs, dtype=torch.float32, device=device)


def polar_factor(u: Tensor) -> Tensor:
    """The polar factor of skew-symmetric matrices u [n, b, b], as in `retraction.polar_of_skew`, in bf16.

    A u of a norm between about 1e-7 and 1e8 has a fourth power that bf16 holds; a smaller u counts as 0.
    """
    squared = u @ u
    x = u @ ops.polar_start(squared, squared @ squared, *STEPS[0], margin=MARGIN)
    for a, b, c in STEPS[1:]:  # x² is -xᵀx
        if c == 0:
            x = x @ identity_plus_product(a, x, x, alpha=-b)
        else:  # a - b x² + c x⁴ is a square and a multiple of 1, for which no sum of matrices is needed
            root = math.sqrt(c)
            half = identity_plus_product(-b / (2 * root), x, x, alpha=root)
            x = x @ identity_plus_product(a - b * b / (4 * c), half, half, alpha=1)
    return x


def inverse_norm(u: Tensor) -> Tensor:
    """The factors [n] of `retraction.scaled_to_one` for u [n, b, b]. u has the limits of `polar_factor`."""
    squared = u @ u
    fourth = squared @ squared
    factor = ops.polar_start(fourth, fourth, 1.0, 0.0, 0.0, margin=1.0)  # a multiple of 1
    return factor[:, 0, 0]


class TensorCoreStep:
    """The steps of one stack of orthogonal matrices [n, b, b] in fp32, with their moments."""

    def __init__(self, start: Tensor, direction: Direction) -> None:
        self._direction = direction
        #: above the diagonal; below it the squares (ops.skew_momentum)
        self._momentum = torch.zeros(start.shape, dtype=torch.bfloat16, device=start.device)
        self._unit: Tensor | None = None

    def __call__(self, q: Tensor, gradient: Tensor, angle: Tensor, rounded: Tensor | None = None) -> None:
        """Replaces q by q exp(-θ J) for the direction J of `gradient`.

        q, gradient: [n, b, b]. angle: a row [2] of `angles`.
        rounded: q in a smaller dtype, from a caller that has it. It is used if the dtype is bf16.
        """
        if self._unit is None:
            self._unit = unit_of(gradient)
        n = q.shape[-1]
        decay, squares = self._direction.momentum, self._direction.squares
        if squares is None and q.device.type != "cpu" and n <= SMALL and n % 16 == 0:
            ops.spectral_step(q, self._momentum, gradient, self._unit, angle, decay, POLYNOMIALS, MARGIN)
            return
        high = rounded if rounded is not None and rounded.dtype == torch.bfloat16 else q.bfloat16()
        # scaled in bf16, rounded once
        scaled = torch.mul(gradient, self._unit, out=torch.empty_like(gradient, dtype=torch.bfloat16))
        u = ops.skew_momentum(high.mT @ scaled, self._momentum, decay, squares)
        if squares is None:
            turn(q, high, polar_factor(u), angle)
        else:
            turn(q, high, u, angle, inverse_norm(u))


def turn(q: Tensor, high: Tensor, j: Tensor, angle: Tensor, scale: Tensor | None = None) -> Tensor:
    """Replaces q by q exp(-θ s j), as in `retraction.turn`; returns q.

    The same product removes what qᵀq - 1 was before. What rounding adds to it stays. A part of j that is not
    skew-symmetric does not turn q; it too is rounding.

    q: [n, b, b]. high: q in bf16. j: [n, b, b] in bf16. angle: a row [2] of `angles`.
    scale: s for each matrix [n] in bf16; None for 1.
    """
    change, scaled = ops.turn_start(j, angle, scale)
    add_product(change, high.mT, high, alpha=-0.5)
    add_product(change, j, scaled)
    return add_product(q, high, change)
