"""`rope`: the rotary position embedding of queries and keys, in one pass over memory."""

import torch
from torch import Tensor


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, whose heads [x, y] become [x cos - y sin, y cos + x sin] (Su et al. 2021, RoFormer).

    q: [b, h, t, d] with an even d, in bf16, fp16 or fp32. k: [b, g, t, d]. cos, sin: [b, t, d] or [1, t, d];
        x has their first halves, and y their second ones. All have one dtype. Views are read where they lie
        if the numbers of a head are neighbours.

    The results have the shapes and the dtype of q and k, and lie in memory as [b, t, h, d]. They are computed
    in fp32 and rounded once. There is no gradient: a backward pass raises. Raises ValueError for other
    shapes, dtypes and devices.
    """
    found: tuple[Tensor, Tensor] = torch.ops.drot.rope(q, k, cos, sin)
    return found


def rope_ref(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` in plain PyTorch, rounded once; in fp64 for arguments in fp64."""
    wide = torch.promote_types(q.dtype, torch.float32)
    cos, sin = cos[:, None].to(wide), sin[:, None].to(wide)

    def turned(heads: Tensor) -> Tensor:
        first, second = heads.to(wide).chunk(2, -1)
        return (heads * cos + torch.cat([-second, first], -1) * sin).to(heads.dtype)

    return turned(q), turned(k)
