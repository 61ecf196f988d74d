"""Orthogonal matrices: the direction of a step in so(n), the step, and the removal of rounding.

Everything is made of matrix products. On a GPU the fp32 products run on the tensor cores: a direction and a
step are computed in bf16, good to 8 bits. What rounding leaves of qᵀq - 1 is measured in two fp16 halves,
which together hold the digits of fp32, so the result is orthogonal to fp32 accuracy. The host never waits
for the GPU.
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
    squared = _product(x, x)
    # ‖x⁴‖_F^(1/4) is never below ‖x‖₂: after the division no singular value is above 1
    norm = torch.linalg.matrix_norm(_product(squared, squared), keepdim=True).sqrt().sqrt()
    norm = torch.where(norm > 0, norm, 1)
    x, squared = x / norm, squared / norm**2
    a, b, c = QUINTIC
    for step in range(QUINTIC_STEPS):
        if step > 0:
            squared = _product(x, x)
        # xᵀx = -x²
        x = a * x + _product(x, c * _product(squared, squared) - b * squared)
    for _ in range(CUBIC_STEPS):
        x = 1.5 * x + 0.5 * _product(x, _product(x, x))
    return x


def turn(q: Tensor, j: Tensor, angle: float) -> Tensor:
    """q exp(-angle · j): every direction of a skew-symmetric, orthogonal j turns by the same angle.

    q: [..., n, n] orthogonal; j: [..., n, n] with j² = -1, or 0 in some directions, which then do not turn.
    As j³ = -j, exp(-θ j) = 1 - sin θ · j + (1 - cos θ) · j². The result is orthogonal to rounding.
    """
    moved = _product(q, j)
    q = q - math.sin(angle) * moved + (1 - math.cos(angle)) * _product(moved, j)
    for _ in range(2 if _on_tensor_cores(q) else 1):
        q = q - 0.5 * _product(q, _deviation(q))
    return q


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


def _on_tensor_cores(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, [..., n, n]; on tensor cores with a and b rounded to bf16."""
    return _half_product(a.bfloat16(), b.bfloat16()) if _on_tensor_cores(a) else a @ b


def _deviation(q: Tensor) -> Tensor:
    """qᵀq - 1 to the accuracy of q's dtype, for q with elements up to about 1."""
    if _on_tensor_cores(q):
        high = q.half()
        # scaled, so that the second half of the digits does not fall below fp16's range
        low = ((q - high) * 2**11).half()
        mixed = _half_product(high.mT, low) * 2**-11
        gram = _half_product(high.mT, high) + mixed + mixed.mT
    else:
        gram = q.mT @ q
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return gram


def _half_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in fp32, of two fp16 or two bf16 tensors; their products are exact."""
    if not a.is_cuda:
        return a.float() @ b.float()
    n = a.shape[-1]
    return torch.bmm(a.reshape(-1, n, n), b.reshape(-1, n, n), out_dtype=torch.float32).view(a.shape)
