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
            check its values. The CPU does not wait for them, unless an expert has more than 128 rows
            on average and no CUDA graph is captured, or the kernel does not fit (`fits_kernel_of_experts`).
        bias: [experts, out] in x's dtype.

    Returns [rows, out] in x's dtype, accumulated in fp32.

    Raises ValueError for other shapes, dtypes, devices or ends, and RuntimeError in a backward pass.
    """
    return torch.ops.drot.sparse24_experts(x, values, positions, ends, bias)


def fits_kernel_of_experts(values: Tensor) -> bool:
    """Whether a GPU has a kernel for the experts with values [experts, out, in/2].

    If not, it multiplies one expert after the other, for which the CPU waits for the numbers of their rows.
    """
    return values.dtype != torch.float32 and values.shape[-1] % 32 == 0


def sparse24_experts_ref(
    x: Tensor, values: Tensor, positions: Tensor, ends: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`sparse24_experts` in plain PyTorch, with the arguments of that op."""
    parts = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    biases = [None] * len(parts) if bias is None else list(bias)
    return torch.cat(
        [sparse24_linear_ref(*arguments) for arguments in zip(parts, values, positions, biases, strict=True)]
    )
