"""Fake kernels and autograd formulas of all drot ops.

A fake kernel returns the shapes and dtypes of the results; torch.compile needs it. The package `drot.ops`
imports this module, so that the import of any op registers all of them.

The ops without a formula here have no gradient: `sparse24_linear` raises in a backward pass
(csrc/bindings.cpp), `spectral_step` returns nothing, and the results of `nm_mask`, `pack24`, `unpack24`,
`sparse24_compress`, `skew_momentum`, `polar_start`, `column_scale`, `column_scale_backward`, `turn_start` and
`cholesky_qr` do not require a gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake

from drot.machine import extension as extension  # registers the schemas


@register_fake("drot::batched_qr")
def _(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(a.shape)


@register_fake("drot::batched_qr_backward")
def _(gq: Tensor, q: Tensor, r: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@register_fake("drot::cholesky_qr")
def _(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(a.shape), a.new_empty(a.shape[:-2], dtype=torch.bool)


@register_fake("drot::entropy_loss")
def _(
    y: Tensor,
    column_scale: Tensor | None = None,
    *,
    rows: bool = True,
    columns: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_loss_and_gradients(y, column_scale)


@register_fake("drot::pruned_importance")
def _(
    y: Tensor, column_scale: Tensor | None = None, *, prune: int, group: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_loss_and_gradients(y, column_scale)


def _fake_loss_and_gradients(y: Tensor, column_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    length = 0 if column_scale is None else column_scale.shape[0]
    return y.new_empty((), dtype=wide), y.new_empty(y.shape), y.new_empty((length,), dtype=wide)


@register_fake("drot::nm_mask")
def _(score: Tensor, prune: int, group: int) -> Tensor:
    return score.new_empty(score.shape, dtype=torch.bool)


@register_fake("drot::sparsegpt_sweep")
def _(
    w: Tensor, hinv: Tensor, removed: Tensor | None, prune: int, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    return w.new_empty(w.shape), w.new_empty(w.shape), w.new_empty(w.shape, dtype=torch.bool)


@register_fake("drot::skew_momentum")
def _(product: Tensor, momentum: Tensor, decay: float, square_decay: float | None = None) -> Tensor:
    return product.new_empty(product.shape)


@register_fake("drot::polar_start")
def _(squared: Tensor, fourth: Tensor, a: float, b: float, c: float, margin: float) -> Tensor:
    return squared.new_empty(squared.shape)


@register_fake("drot::column_scale")
def _(product: Tensor, inverse: bool) -> Tensor:
    count, _rows, n = product.shape
    return product.new_empty((count, n), dtype=torch.float32)


@register_fake("drot::column_scale_backward")
def _(product: Tensor, value: Tensor, gradient: Tensor, inverse: bool) -> Tensor:
    return product.new_empty(product.shape)


@register_fake("drot::turn_start")
def _(j: Tensor, angle: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return j.new_empty(j.shape), j.new_empty(j.shape)


@register_fake("drot::spectral_step")
def _(
    q: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    unit: Tensor,
    angle: Tensor,
    decay: float,
    polynomials: list[float],
    margin: float,
) -> None:
    return None


@register_fake("drot::pack24")
def _(w: Tensor) -> tuple[Tensor, Tensor]:
    r, c = w.shape
    return w.new_empty(r, c // 2), w.new_empty(r, c // 8, dtype=torch.uint8)


@register_fake("drot::unpack24")
def _(values: Tensor, positions: Tensor) -> Tensor:
    return values.new_empty(values.shape[0], 2 * values.shape[1])


@register_fake("drot::sparse24_linear")
def _(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    rotation: Tensor | None = None,
    compressed: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], values.shape[0])


@register_fake("drot::sparse24_compress")
def _(values: Tensor, positions: Tensor) -> Tensor:
    return positions.new_empty(torch.library.get_ctx().new_dynamic_size())


def _save_factors(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.set_materialize_grads(False)


def _qr_backward(ctx: Any, gq: Tensor | None, gr: Tensor | None) -> Tensor | None:
    if gr is not None:
        raise RuntimeError("batched_qr is differentiable in q only, but r has a gradient; use r.detach()")
    if gq is None:
        return None
    ga: Tensor = torch.ops.drot.batched_qr_backward(gq, *ctx.saved_tensors)
    return ga


def _refuse_second_qr_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError("batched_qr has no second derivative; use batched_qr_ref")


def _refuse_sweep_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise NotImplementedError("sparsegpt_sweep has no gradient; pass w.detach() and hinv.detach()")


class _OnceDifferentiable(torch.autograd.Function):
    """The identity on a gradient; its own derivative raises NotImplementedError."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor, name: str) -> Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(f"{ctx.name} is differentiable once; use {ctx.name}_ref for more")


def _register_loss_autograd(name: str) -> None:
    """Registers the formula of an op (y, column_scale, ...) -> (loss, dy, dcolumn_scale).

    The loss is differentiable once in y and column_scale.
    """

    def save_gradients(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict, output: tuple) -> None:
        _loss, dy, dcolumn_scale = output
        ctx.has_column_scale = inputs[1] is not None
        ctx.mark_non_differentiable(dy, dcolumn_scale)
        ctx.save_for_backward(dy, dcolumn_scale)

    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dcolumn_scale = ctx.saved_tensors
        grads = [grad_loss * dy, grad_loss * dcolumn_scale if ctx.has_column_scale else None]
        if torch.is_grad_enabled():
            # create_graph=True: without the anchor the results would be constants for the next derivative
            anchor = torch.zeros((), requires_grad=True)
            grads = [None if g is None else _OnceDifferentiable.apply(g, anchor, name) for g in grads]
        return tuple(grads)

    register_autograd(f"drot::{name}", backward, setup_context=save_gradients)


register_autograd("drot::batched_qr", _qr_backward, setup_context=_save_factors)
register_autograd("drot::batched_qr_backward", _refuse_second_qr_derivative)
register_autograd("drot::sparsegpt_sweep", _refuse_sweep_backward)
_register_loss_autograd("entropy_loss")
_register_loss_autograd("pruned_importance")
