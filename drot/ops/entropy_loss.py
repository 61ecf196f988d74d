"""`entropy_loss`: the entropy of the normalised scores of rows and columns (paper, equations 5 and 8)."""

import torch
from torch import Tensor


def entropy_loss(
    y: Tensor, m: Tensor | None = None, *, rows: bool = True, columns: bool = False, scale: float = 1.0
) -> Tensor:
    """scale · Σ H over the rows and/or the columns of the scores s = y²·m.

    y: [r, c], bf16, fp16, fp32 or fp64; m: [c], the factor of each column, not negative, fp32 (fp64
    for fp64 y), or None for 1. H = -Σ p log p with p = s / Σ s; with both axes the losses add up.
    Returns a 0-dim fp32 tensor (fp64 for fp64 y), differentiable once in y and m.

    0·log 0 = 0: a score of 0 and a group whose sum is 0 add nothing and carry no gradient. A score
    below the smallest normal number of the type of m counts as 0; y²·m and its sums must stay finite
    in that type.
    On the CPU, non-finite or negative input raises ValueError, as do other shapes and dtypes. On a
    GPU nothing waits for the values, so there non-finite or negative input makes the loss NaN.
    """
    loss: Tensor = torch.ops.drot.entropy_loss(y, m, rows=rows, columns=columns, scale=scale)[0]
    return loss


def entropy_loss_and_grad(
    y: Tensor, m: Tensor | None = None, *, rows: bool = True, columns: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of `entropy_loss` with its gradients, outside of autograd.

    Returns loss (0-dim), dy [r, c] in y's dtype and dm [c] in m's (empty where m is None).
    """
    with torch.no_grad():
        loss, dy, dm = torch.ops.drot.entropy_loss(y, m, rows=rows, columns=columns, scale=scale)
    return loss, dy, dm


@torch.library.register_fake("drot::entropy_loss")
def _(
    y: Tensor, m: Tensor | None = None, *, rows: bool = True, columns: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_loss_and_gradients(y, m)


def fake_loss_and_gradients(y: Tensor, m: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of (loss, dy, dm), for the ops on scores y²·m."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    length = 0 if m is None else m.shape[0]
    return y.new_empty((), dtype=wide), y.new_empty(y.shape), y.new_empty((length,), dtype=wide)


class _OnceOnly(torch.autograd.Function):
    """The identity on a gradient, whose own derivative is refused by a message."""

    @staticmethod
    def forward(ctx, gradient, anchor, name):  # type: ignore[no-untyped-def]
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            f"{ctx.name} is differentiable once, and its second derivative was asked for; "
            f"use {ctx.name}_ref for that"
        )


def register_loss_autograd(name: str) -> None:
    """Autograd of an op (y, m, ...) -> (loss, dy, dm): the loss is differentiable, once, in y and m."""

    def setup_context(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
        _loss, dy, dm = output
        ctx.has_factor = inputs[1] is not None
        ctx.mark_non_differentiable(dy, dm)
        ctx.save_for_backward(dy, dm)

    def backward(ctx, grad_loss, grad_dy, grad_dm):  # type: ignore[no-untyped-def]
        dy, dm = ctx.saved_tensors
        grads = [grad_loss * dy, grad_loss * dm if ctx.has_factor else None]
        if torch.is_grad_enabled():  # create_graph=True; the anchor makes the results part of its graph
            anchor = torch.zeros((), requires_grad=True)
            grads = [None if g is None else _OnceOnly.apply(g, anchor, name) for g in grads]
        return tuple(grads)

    torch.library.register_autograd(f"drot::{name}", backward, setup_context=setup_context)


register_loss_autograd("entropy_loss")


def entropy_loss_ref(
    y: Tensor, m: Tensor | None = None, *, rows: bool = True, columns: bool = False, scale: float = 1.0
) -> Tensor:
    """Plain PyTorch form of `entropy_loss`, differentiable any number of times."""
    s = scores_ref(y, m)
    s = torch.where(s > 0, s, 0)
    loss = s.new_zeros(())
    for dim in [1] * rows + [0] * columns:
        z = s.sum(dim, keepdim=True)
        p = s / torch.where(z > 0, z, 1)
        loss = loss - (p * torch.where(p > 0, p, 1).log()).sum()
    return scale * loss


def scores_ref(y: Tensor, m: Tensor | None) -> Tensor:
    """y²·m in fp32 (fp64 for fp64 y), multiplied in the order of the native ops."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    return wide.square() if m is None else wide * (wide * m)
