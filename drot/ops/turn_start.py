"""`turn_start`: the two matrices that a turn is computed from, in one pass over its direction."""

import torch
from torch import Tensor


@torch.no_grad()
def turn_start(j: Tensor, angle: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """½ · 1 + angle₀ s · j and angle₁ s² · j, both [count, n, n] in bf16.

    With them a turn by θ along s j is q + q (½ · 1 + angle₀ s · j - ½ qᵀq + j (angle₁ s² · j)), for
    angle₀ = -sin θ and angle₁ = 1 - cos θ. The term with qᵀq makes q orthogonal again.

    j: the direction [count, n, n] in bf16.
    angle: two factors [2] in fp32, on the device of j. No value of it is read on the host.
    scale: s for each matrix [count] in bf16, with any stride; None for 1.

    Both results are computed in fp32 and rounded once; on a GPU the op is one kernel. They have no gradient.
    Raises ValueError for other shapes and dtypes.
    """
    return torch.ops.drot.turn_start(j, angle, scale)


@torch.no_grad()
def turn_start_ref(j: Tensor, angle: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`turn_start` in plain PyTorch."""
    s = angle.new_ones(len(j)) if scale is None else scale.to(angle.dtype)
    linear, square = s * angle[0], s * s * angle[1]
    change, scaled = (factor[:, None, None] * j.to(angle.dtype) for factor in (linear, square))
    change.diagonal(dim1=-2, dim2=-1).add_(0.5)
    return change.to(j.dtype), scaled.to(j.dtype)
