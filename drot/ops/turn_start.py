"""`turn_start`: the two matrices that a turn is computed from, in one pass over its direction."""

import torch
from torch import Tensor


def turn_start(j: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """½ · 1 + angle₀ · j and angle₁ · j, both [count, n, n] in bf16.

    With them a turn by θ along j is q + q (½ · 1 + angle₀ · j - ½ qᵀq + j (angle₁ · j)), for angle₀ = -sin θ
    and angle₁ = 1 - cos θ. The term with qᵀq makes q orthogonal again.

    j: the direction [count, n, n] in bf16.
    angle: two factors [2] in fp32, on the device of j. No value of it is read on the host.

    Both results are computed in fp32 and rounded once; on a GPU the op is one kernel. They have no gradient.
    Raises ValueError for other shapes and dtypes.
    """
    with torch.no_grad():
        change, scaled = torch.ops.drot.turn_start(j, angle)
    return change, scaled


@torch.no_grad()
def turn_start_ref(j: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """`turn_start` in plain PyTorch."""
    change, scaled = angle[0] * j.to(angle.dtype), angle[1] * j.to(angle.dtype)
    change.diagonal(dim1=-2, dim2=-1).add_(0.5)
    return change.to(j.dtype), scaled.to(j.dtype)
