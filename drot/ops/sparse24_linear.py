"""`sparse24_linear`: the product with a packed 2:4 weight, and what is added to it."""

import torch
from torch import Tensor

from drot.ops.pack24 import unpack24_ref


def sparse24_linear(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    rotation: Tensor | None = None,
    compressed: Tensor | None = None,
) -> Tensor:
    """y = x Wᵀ (+ bias) (+ residual, or + residual @ rotation), for inference.

    x: [..., in], bf16, fp16 or fp32. values [out, in/2] in x's dtype and positions uint8 [out, in/8]:
    W [out, in] as `pack24` gives it; that positions ascend is checked by `unpack24`, not here. bias:
    [out]; residual: [..., out]; rotation: [out, out], which needs a residual; all in x's dtype.
    compressed: what `sparse24_compress` made of the same weight, for the GPU with many tokens.
    Returns [..., out] in x's dtype, accumulated in fp32. Raises ValueError for other shapes, dtypes
    or devices, RuntimeError in a backward pass.
    """
    return torch.ops.drot.sparse24_linear(x, values, positions, bias, residual, rotation, compressed)


def sparse24_compress(values: Tensor, positions: Tensor) -> Tensor:
    """The packed weight as the GPU's library wants it for many tokens: made once, where it is loaded.

    values [out, in/2], positions uint8 [out, in/8], as of `pack24`. Returns uint8 [n], opaque and of
    use on this kind of device alone; n = 0 where no library takes it: on the CPU, in fp32, without
    cuSPARSELt, or in a shape that it refuses. Raises ValueError for other shapes or dtypes.
    """
    return torch.ops.drot.sparse24_compress(values, positions)


@torch.library.register_fake("drot::sparse24_linear")
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


@torch.library.register_fake("drot::sparse24_compress")
def _(values: Tensor, positions: Tensor) -> Tensor:
    return positions.new_empty(torch.library.get_ctx().new_dynamic_size())


def sparse24_linear_ref(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    rotation: Tensor | None = None,
) -> Tensor:
    """Plain PyTorch form of `sparse24_linear`."""
    y = torch.nn.functional.linear(x, unpack24_ref(values, positions), bias)
    if residual is not None:
        y = y + (residual if rotation is None else residual @ rotation)
    return y
