"""`sparse24_experts`: the products of the experts of a mixture, whose 2:4 weights are packed."""

import torch
from torch import Tensor

from drot.ops.sparse24_linear import sparse24_linear_ref


def sparse24_experts(
    x: Tensor, values: Tensor, positions: Tensor, ends: Tensor, bias: Tensor | None = None
) -> Tensor:
    """y = x Wₑᵀ (+ bₑ) for the rows of x that each expert e has, for inference.

    Args:
        x: [rows, in], bf16, fp16 or fp32. The rows of an expert follow those of the expert before.
        values: [experts, out, in/2] in x's dtype, from `pack24` of each Wₑ [out, in].
        positions: uint8 [experts, out, in/8], from `pack24`. Only `unpack24` checks that they ascend.
        ends: int32 [experts]. Expert e has the rows from ends[e - 1], or 0, up to ends[e]. A GPU does not
            check its values, and the CPU does not wait for them, unless the experts have more than 128 rows
            each or the GPU's kernel for experts cannot be used: for fp32, or `in` not a multiple of 64.
        bias: [experts, out] in x's dtype.

    Returns [rows, out] in x's dtype, accumulated in fp32.

    Raises ValueError for other shapes, dtypes, devices or ends, and RuntimeError in a backward pass.
    """
    return torch.ops.drot.sparse24_experts(x, values, positions, ends, bias)


def sparse24_experts_ref(
    x: Tensor, values: Tensor, positions: Tensor, ends: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`sparse24_experts` in plain PyTorch, with the arguments of that op."""
    parts = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    biases = [None] * len(parts) if bias is None else list(bias)
    return torch.cat(
        [sparse24_linear_ref(*arguments) for arguments in zip(parts, values, positions, biases, strict=True)]
    )
