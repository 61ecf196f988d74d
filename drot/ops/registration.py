"""Fake kernels, autograd formulas and references on a CPU: what the native module leaves to Python.

A fake kernel returns the shapes and dtypes of the results; torch.compile needs it. The package `drot.ops`
imports this module, so that the import of any op registers all of them.

`swiglu_rotate` has its formula in C++ (csrc/ops/swiglu_rotate.cpp). The other ops without a formula here have
no gradient: `sparse24_linear`, `sparse24_experts`, `pack24`, `unpack24`, `cholesky_qr` and `rope` raise in a
backward pass (csrc/bindings.cpp), `spectral_step` returns nothing, and the results of the others do not
require a gradient.

No op has a derivative in forward mode: torch.func.jvp of an op with a formula here gives zeros.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import impl, register_autograd, register_fake

from drot.ops import extension as extension  # registers the schemas
from drot.ops.polar_start import polar_start_ref
from drot.ops.skew_momentum import skew_momentum_ref
from drot.ops.spectral_step import spectral_step_ref
from drot.ops.turn_start import turn_start_ref


def _like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return t.new_empty(t.shape, dtype=dtype)


def _loss_and_gradients(y: Tensor, column_scale: Tensor | None = None, **_: Any) -> tuple[Tensor, ...]:
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    length = 0 if column_scale is None else column_scale.shape[0]
    return y.new_empty((), dtype=wide), _like(y), y.new_empty(length, dtype=wide)


#: op → its fake kernel
FAKE_KERNELS: dict[str, Callable[..., Any]] = {
    "batched_qr": lambda a: (_like(a), _like(a)),
    "batched_qr_backward": lambda gq, q, r: _like(q),
    "cholesky_qr": lambda a: (_like(a), _like(a), a.new_empty(a.shape[:-2], dtype=torch.bool)),
    "column_scale": lambda product, inverse: product.new_empty(
        product.shape[0], product.shape[2], dtype=torch.float32
    ),
    "column_scale_backward": lambda product, *_: _like(product),
    "entropy_loss": _loss_and_gradients,
    "nm_mask": lambda score, prune, group: _like(score, torch.bool),
    "pack24": lambda w: (
        w.new_empty(w.shape[0], w.shape[1] // 2),
        w.new_empty(w.shape[0], w.shape[1] // 8, dtype=torch.uint8),
    ),
    "polar_start": lambda squared, *_: _like(squared),
    "pruned_importance": _loss_and_gradients,
    "rope": lambda q, k, *_: tuple(_like(t.transpose(1, 2)).transpose(1, 2) for t in (q, k)),
    "skew_momentum": lambda product, *_: _like(product),
    "sparse24_compress": lambda values, positions: positions.new_empty(
        torch.library.get_ctx().new_dynamic_size()
    ),
    "sparse24_experts": lambda x, values, *_: x.new_empty(x.shape[0], values.shape[1]),
    "sparse24_linear": lambda x, values, *_: x.new_empty(*x.shape[:-1], values.shape[0]),
    "sparsegpt_sweep": lambda w, *_: (_like(w), _like(w), _like(w, torch.bool)),
    "spectral_step": lambda *_: None,
    "swiglu_rotate": lambda gate, *_: gate.new_empty(gate.shape),
    "turn_start": lambda j, *_: (_like(j), _like(j)),
    "unpack24": lambda values, positions: values.new_empty(values.shape[0], 2 * values.shape[1]),
}
for name, fake_kernel in FAKE_KERNELS.items():
    register_fake(f"drot::{name}", fake_kernel)


def _register_on_cpu(name: str, reference: Callable[..., Any]) -> None:
    """Makes `reference` the CPU kernel of an op that only the steps on a GPU use, after the op's own checks.

    The references get contiguous tensors. Those that an op writes are contiguous already, as the checks say.
    """
    check = getattr(torch.ops.drot, f"check_{name}")

    def kernel(*arguments: Any) -> Any:
        check(*arguments)
        with torch.autocast("cpu", enabled=False):
            return reference(*(a.contiguous() if isinstance(a, Tensor) else a for a in arguments))

    impl(f"drot::{name}", "CPU", kernel)


_register_on_cpu("polar_start", polar_start_ref)
_register_on_cpu("skew_momentum", skew_momentum_ref)
_register_on_cpu("spectral_step", spectral_step_ref)
_register_on_cpu("turn_start", turn_start_ref)


def _refuse(error: Exception) -> Callable[..., None]:
    """An autograd formula that raises `error`."""

    def backward(ctx: Any, *grads: Tensor | None) -> None:
        raise error

    return backward


def _save_factors(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.set_materialize_grads(False)


def _qr_backward(ctx: Any, gq: Tensor | None, gr: Tensor | None) -> Tensor | None:
    if gr is not None:
        raise RuntimeError("batched_qr is differentiable in q only, but r has a gradient; use r.detach()")
    return None if gq is None else torch.ops.drot.batched_qr_backward(gq, *ctx.saved_tensors)


register_autograd("drot::batched_qr", _qr_backward, setup_context=_save_factors)
register_autograd(
    "drot::batched_qr_backward",
    _refuse(RuntimeError("batched_qr has no second derivative; use batched_qr_ref")),
)
register_autograd(
    "drot::sparsegpt_sweep",
    _refuse(NotImplementedError("sparsegpt_sweep has no gradient; pass w.detach() and hinv.detach()")),
)


class _OnceDifferentiable(torch.autograd.Function):
    """The identity on a gradient; its own derivative raises NotImplementedError."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor, name: str) -> Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(f"{ctx.name} is differentiable once; use {ctx.name}_ref for more")


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict, output: tuple) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _loss_backward(name: str) -> Callable[..., tuple[Tensor | None, ...]]:
    """The formula of an op (y, column_scale, ...) -> (loss, dy, dcolumn_scale)."""

    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        grads = [grad_loss * gradient if needed else None for gradient, needed in saved]
        if torch.is_grad_enabled():
            # create_graph=True: without the anchor the results would be constants for the next derivative
            anchor = torch.zeros((), requires_grad=True)
            grads = [None if g is None else _OnceDifferentiable.apply(g, anchor, name) for g in grads]
        return tuple(grads)

    return backward


for name in ("entropy_loss", "pruned_importance"):
    register_autograd(f"drot::{name}", _loss_backward(name), setup_context=_save_gradients)
