"""`rope`: the rotary position embedding of queries and keys, in one pass over memory."""

import torch
from torch import Tensor


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, whose heads [x, y] become [x cos - y sin, y cos + x sin] (Su et al. 2021, RoFormer).

    q: [b, h, t, d] with an even d, in bf16, fp16 or fp32. k: [b, g, t, d]. cos, sin: [b, t, d] or [1, t, d];
        x has their first halves, and y their second ones. All have one dtype. Views are read where they lie
        if the numbers of a head are neighbours.

    The results have the shapes and the dtype of q and k, and lie in memory as [b, t, h, d]. They have the
    bits of transformers: each of the two products is rounded, and so is their sum. There is no gradient: a
    backward pass raises. Raises ValueError for other shapes, dtypes and devices.
    """
    found: tuple[Tensor, Tensor] = torch.ops.drot.rope(q, k, cos, sin)
    return found


def rope_ref(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` in plain PyTorch, as transformers computes it, also in fp64."""
    cos, sin = cos[:, None], sin[:, None]

    def turned(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat([-second, first], -1) * sin

    return turned(q), turned(k)
