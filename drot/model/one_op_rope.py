"""The rotary position embedding of a stock attention by one op, where transformers starts about ten.

transformers calls the embedding as a function of the module that defines the family, so that no module can
stand in its place. The forward of the attention is copied with another function under that name.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from drot.machine.devices import has_kernels
from drot.model.block_rotation import ONE_OP_DTYPES
from drot.model.mixins import Mixin
from drot.ops.rope import rope, rope_ref

#: the name of the function in the modules of transformers
APPLY = "apply_rotary_pos_emb"


class OneOpRope(Mixin):
    """Mixin in front of a class of attentions that `has_standard_rope`: turns queries and keys by one op."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        stock: Any = inspect.unwrap(cls.__bases__[1].forward)  # type: ignore[attr-defined]
        turn = functools.partial(_turned, stock.__globals__[APPLY])
        names = {**stock.__globals__, APPLY: turn}
        del names["__name__"]  # by which torch.compile would look for the function in the module
        forward = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
        forward.__kwdefaults__ = stock.__kwdefaults__
        cls.forward = forward  # type: ignore[attr-defined]


def has_standard_rope(attention: Any) -> bool:
    """Whether the forward of an attention calls the embedding that `rope` computes."""
    forward = inspect.unwrap(type(attention).forward)
    apply = forward.__globals__.get(APPLY)
    return apply is not None and APPLY in forward.__code__.co_names and _is_standard(apply)


@functools.cache
def _is_standard(apply: Callable[..., Any]) -> bool:
    """Whether a function of transformers computes `rope`, on an example."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 8), (2, 3, 8)
    given = [torch.randn(s, generator=generator, dtype=torch.float64, device="cpu") for s in shapes]
    try:
        found = apply(*given)
    except Exception:  # it takes other arguments
        return False
    wanted = rope_ref(*given)
    return len(found) == 2 and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-12, atol=1e-12)
        for one, other in zip(found, wanted, strict=True)
    )


def _turned(
    stock: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any
) -> Any:
    """What `stock` returns, by one op if there is one for these arguments."""
    fits = (
        not (others or options)
        and q.dtype in ONE_OP_DTYPES
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and cos.dim() == 3
        and cos.shape[-1] == q.shape[-1]
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
        and not torch.compiler.is_compiling()  # the compiler makes one kernel of the stock function
        and has_kernels(q.device)
    )
    return rope(q, k, cos, sin) if fits else stock(q, k, cos, sin, *others, **options)
