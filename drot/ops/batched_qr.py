"""`batched_qr`: QR factors with diag(r) >= 0, of one large or many small matrices."""

import torch
from torch import Tensor


def batched_qr(a: Tensor) -> tuple[Tensor, Tensor]:
    """a = q r with qᵀq = 1, r upper triangular and diag(r) >= 0.

    a: [..., n, n], fp32 or fp64. Returns q, r of the same shape and dtype. The factors of an invertible
    matrix are unique; diag(r) of a singular matrix may hold zeros. Non-finite input gives non-finite r.

    n <= 256: Householder reflections (Golub & Van Loan, algorithm 5.1.1), each matrix by one thread block or
    one CPU thread. n > 256: LAPACK or cuSOLVER, but fp32 on a GPU with fast fp64 (at least 1/8 of the rate of
    fp32) first tries `cholesky_qr`. The CPU waits for the GPU only to read whether the result is reliable.

    Differentiable once in q. Raises ValueError for other shapes or dtypes, and in a backward pass
    RuntimeError for a gradient of r or a second derivative.
    """
    return torch.ops.drot.batched_qr(a)


def batched_qr_backward(gq: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """The gradient in a from the gradient gq in q: (gq + q C) r⁻ᵀ, M = -gqᵀq, C = tril(M) + tril(M, -1)ᵀ.

    gq, q, r: [..., n, n], fp32 or fp64, with r invertible. Returns [..., n, n]. Raises ValueError for other
    shapes or dtypes, and where the three differ in shape, dtype or device.
    """
    return torch.ops.drot.batched_qr_backward(gq, q, r)


def cholesky_qr(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """CholeskyQR, the factors of `batched_qr` for well-conditioned matrices: aᵀa = rᵀr in fp64, q = a r⁻¹.

    a: [..., n, n], fp32 or fp64. Returns q, r and `reliable`, bool [...]: False where a is so ill-conditioned
    that q is not orthogonal to fp32 accuracy (for fp64 input: to 1e-10); use `batched_qr` there. The CPU does
    not wait for the GPU. Not differentiable. Raises ValueError for other shapes or dtypes.
    """
    return torch.ops.drot.cholesky_qr(a)


def batched_qr_ref(a: Tensor) -> tuple[Tensor, Tensor]:
    """`batched_qr` in plain PyTorch, differentiable in q and r."""
    q, r = torch.linalg.qr(a)
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(a.dtype)
    return q * sign.unsqueeze(-2), r * sign.unsqueeze(-1)
