"""`sparse24_linear`: the product with a packed 2:4 weight plus bias and residual."""

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

    Args:
        x: [..., in], bf16, fp16 or fp32.
        values: [out, in/2] in x's dtype, from `pack24` of W [out, in].
        positions: uint8 [out, in/8], from `pack24`. Only `unpack24` checks that they ascend.
        bias: [out] in x's dtype.
        residual: [..., out] in x's dtype.
        rotation: [out, out] in x's dtype; needs a residual. It is read fastest by columns.
        compressed: the result of `sparse24_compress` for this weight. A GPU uses it for many tokens.

    Returns [..., out] in x's dtype, accumulated in fp32.

    Raises ValueError for other shapes, dtypes or devices, and RuntimeError in a backward pass.
    """
    return torch.ops.drot.sparse24_linear(x, values, positions, bias, residual, rotation, compressed)


def sparse24_compress(values: Tensor, positions: Tensor) -> Tensor:
    """The compressed form of the packed weight, for cuSPARSELt, to be computed once when a weight is loaded.

    values [out, in/2] and positions uint8 [out, in/8] from `pack24`. Returns uint8 [n], which is opaque and
    valid for this kind of GPU alone. n = 0 where cuSPARSELt cannot be used: on the CPU, in fp32, in a build
    without it, or for a shape that it does not support. Raises ValueError for other shapes or dtypes.
    """
    return torch.ops.drot.sparse24_compress(values, positions)


def sparse24_linear_ref(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    rotation: Tensor | None = None,
) -> Tensor:
    """`sparse24_linear` in plain PyTorch, with the arguments of that op."""
    y = torch.nn.functional.linear(x, unpack24_ref(values, positions), bias)
    if residual is not None:
        y = y + (residual if rotation is None else residual @ rotation)
    return y
