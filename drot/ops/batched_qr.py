"""`batched_qr`: QR factors with a positive diagonal of R, for one large or many small matrices."""

from typing import Any

import torch
from torch import Tensor

from drot import _extension as _extension


def batched_qr(a: Tensor) -> tuple[Tensor, Tensor]:
    """The QR factors of square matrices.

    a: [..., n, n], fp32 or fp64. Returns q, r of the same shape: a = q r, qᵀq = 1, r upper
    triangular with a diagonal >= 0, which makes the factors of an invertible matrix unique. A zero
    on the diagonal stays; non-finite input gives NaN. Differentiable in q; a gradient that arrives
    through r raises RuntimeError, and so does a second derivative.

    On a GPU fp32 matrices wider than 256 go through `cholesky_qr`, and through Householder reflections
    where it was not reliable: the host waits for that one answer. Nothing else waits.
    """
    q, r = torch.ops.drot.batched_qr(a)
    return q, r


def batched_qr_backward(gq: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """The gradient in a, [..., n, n], of a loss whose gradient in q is gq; r must be invertible.

    With M = -gqᵀq and C = tril(M) + tril(M, -1)ᵀ it is (gq + q C) r⁻ᵀ.
    """
    ga: Tensor = torch.ops.drot.batched_qr_backward(gq, q, r)
    return ga


def rebased_backward(gq: Tensor, q: Tensor) -> Tensor:
    """`batched_qr_backward` where a = q and r = 1, without the triangular solve: q tril(S - Sᵀ, -1)
    with S = qᵀ gq. gq, q: [..., n, n]."""
    s = q.mT @ gq
    return q @ (s - s.mT).tril(-1)


def cholesky_qr(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same factors from one Cholesky factorisation of aᵀa in fp64.

    a: [..., n, n], fp32 or fp64. Also returns `reliable`, bool [...]: False where q is not
    orthogonal to fp32 accuracy (for fp64 input: to 1e-10), because a is too ill-conditioned; q and r
    are of no use there. Does not wait for the GPU. Not differentiable.
    """
    q, r, reliable = torch.ops.drot.cholesky_qr(a)
    return q, r, reliable


def batched_qr_ref(a: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch form of `batched_qr`, differentiable in both factors."""
    q, r = torch.linalg.qr(a)
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(a.dtype)
    return q * sign.unsqueeze(-2), r * sign.unsqueeze(-1)


@torch.library.register_fake("drot::batched_qr")
def _(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(a.shape)


@torch.library.register_fake("drot::batched_qr_backward")
def _(gq: Tensor, q: Tensor, r: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("drot::cholesky_qr")
def _(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(a.shape), a.new_empty(a.shape[:-2], dtype=torch.bool)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gq: Tensor | None, gr: Tensor | None) -> Tensor | None:
    if gr is not None:
        raise RuntimeError("batched_qr is differentiable in q only; a gradient came through r: detach it")
    return None if gq is None else batched_qr_backward(gq, *ctx.saved_tensors)


def _no_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError("batched_qr has no second derivative; use batched_qr_ref")


torch.library.register_autograd("drot::batched_qr", _backward, setup_context=_setup_context)
torch.library.register_autograd("drot::batched_qr_backward", _no_second_derivative)
