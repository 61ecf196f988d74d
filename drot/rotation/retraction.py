"""The retraction of a step in the tangent space so(n) to SO(n), and the correction of rounding errors.

On a GPU the fp32 products run on the tensor cores. The step is multiplied in bf16, to 8 bits. The deviation
qᵀq - 1 is computed from two fp16 parts of q, which together have the accuracy of fp32, so that the result is
orthogonal to fp32 accuracy. The CPU does not wait for the GPU.
"""

import torch
from torch import Tensor


def retract(q: Tensor, omega: Tensor) -> Tensor:
    """q (1 - omega/2)⁻¹ (1 + omega/2), the Cayley transform of a step: q expm(omega) to second order.

    q: [..., n, n], orthogonal, fp32 or fp64. omega: [..., n, n], skew-symmetric, in q's dtype. Returns an
    orthogonal matrix [..., n, n]. Its rounding error is corrected, so that the error does not grow over many
    steps. Raises ValueError for different shapes.
    """
    if q.shape != omega.shape or q.dim() < 2 or q.shape[-1] != q.shape[-2]:
        raise ValueError(f"q and omega must both be [..., n, n], got {list(q.shape)} and {list(omega.shape)}")
    if q.numel() == 0:
        return q.clone()
    moved = q + _product(q, _cayley_of_skew(omega))
    for _ in range(2 if _on_tensor_cores(q) else 1):
        moved = moved - 0.5 * _product(moved, _deviation(moved))
    return moved


def newton_schulz(x: Tensor) -> Tensor:
    """x (3 - xᵀx)/2, one step from x [..., n, n] towards its orthogonal polar factor.

    A singular value 1 + e becomes 1 - 3/2 e² + O(e³). The iteration converges for singular values in (0, √3).
    """
    return 1.5 * x - 0.5 * x @ (x.mT @ x)


@torch.no_grad()
def reorthogonalize(q: Tensor) -> Tensor:
    """The orthogonal matrix nearest to an almost orthogonal q, in fp64, by two Newton–Schulz steps."""
    return newton_schulz(newton_schulz(q.double()))


def orthogonality_error(q: Tensor) -> float:
    """max |qᵀq − 1| over all matrices of q [..., n, n], in fp64."""
    q = q.double()
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return float((q.mT @ q - eye).abs().amax())


def _cayley_of_skew(omega: Tensor) -> Tensor:
    """(1 - omega/2)⁻¹ (1 + omega/2) - 1."""
    # linalg.solve would wait for the GPU to check for a singular matrix; 1 - omega/2 is never singular
    solved: Tensor = torch.linalg.solve_ex(_plus_identity(-0.5 * omega, 1.0), omega)[0]
    return solved


def _plus_identity(x: Tensor, value: float) -> Tensor:
    """x + value · 1, computed in place."""
    x.diagonal(dim1=-2, dim2=-1).add_(value)
    return x


def _on_tensor_cores(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b [..., n, n]. On tensor cores a and b are rounded to bf16."""
    return _half_product(a.bfloat16(), b.bfloat16()) if _on_tensor_cores(a) else a @ b


def _deviation(q: Tensor) -> Tensor:
    """qᵀq - 1 to the accuracy of q's dtype, if the elements of q are not much larger than 1."""
    if _on_tensor_cores(q):
        high = q.half()
        # without the factor 2**11 the low part would be too small for fp16
        low = ((q - high) * 2**11).half()
        mixed = _half_product(high.mT, low) * 2**-11
        gram = _half_product(high.mT, high) + mixed + mixed.mT
    else:
        gram = q.mT @ q
    return _plus_identity(gram, -1.0)


def _half_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in fp32, for two fp16 or two bf16 tensors, whose elementwise products are exact in fp32."""
    if not a.is_cuda:
        return a.float() @ b.float()
    n = a.shape[-1]
    return torch.bmm(a.reshape(-1, n, n), b.reshape(-1, n, n), out_dtype=torch.float32).view(a.shape)
