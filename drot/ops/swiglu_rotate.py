"""`swiglu_rotate`: the gated activation of an MLP, also rotated by blocks, in one pass over memory."""

import torch
from torch import Tensor


def swiglu_rotate(gate: Tensor, up: Tensor, rotation: Tensor | None = None) -> Tensor:
    """(SiLU(gate) · up) R3 [..., n·b] with R3 = blockdiag(rotation), the input of a rotated down_proj.

    gate, up: [..., n·b] in bf16, fp16 or fp32. Halves of one tensor, as of a fused gate_up_proj, are read
        where they lie.
    rotation: [n, b, b], of the same dtype; None for SiLU(gate) · up alone.

    The result has the dtype of its arguments. SiLU and product are computed in fp32. A CPU rounds once, to
    the result. A GPU rounds the gated activation to a 16-bit dtype before it rotates it as well, for its
    tensor cores. The bytes of a token do not depend on the other tokens or on the number of threads. It has
    gradients of any order, which are computed in fp32. Raises ValueError for other shapes, dtypes and
    devices, and NotImplementedError for a derivative in forward mode.
    """
    return torch.ops.drot.swiglu_rotate(gate, up, rotation)


def swiglu_rotate_ref(gate: Tensor, up: Tensor, rotation: Tensor | None = None) -> Tensor:
    """`swiglu_rotate` in plain PyTorch, rounded once; in fp64 for arguments in fp64."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    gated = torch.nn.functional.silu(gate.to(wide)) * up.to(wide)
    if rotation is None:
        return gated.to(gate.dtype)
    blocks = gated.unflatten(-1, (len(rotation), -1))
    return torch.einsum("...ni,nij->...nj", blocks, rotation.to(wide)).flatten(-2).to(gate.dtype)
