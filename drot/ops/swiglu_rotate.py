"""`swiglu_rotate`: the gated activation of an MLP, also rotated by blocks, in one pass over memory."""

import torch
from torch import Tensor


def swiglu_rotate(
    gate: Tensor, up: Tensor, rotation: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """(SiLU(gate) · up) R3 [..., n·b] with R3 = blockdiag(rotation), the input of a rotated down_proj.

    gate, up: [..., n·b] in bf16, fp16 or fp32. Halves of one tensor, as of a fused gate_up_proj, are read
        where they lie.
    rotation: [n, b, b], of the same dtype; None for SiLU(gate) · up alone.
    ends: int32 [experts], for the experts of a mixture. Expert e has the rows of gate and up [rows, n·b] from
        ends[e - 1], or 0, up to ends[e], and the e-th part of the blocks [experts·n, b, b]. A GPU does not
        check the values of `ends`.

    The result has the dtype of its arguments. SiLU and product are computed in fp32. A CPU rounds once, to
    the result. A GPU rounds the gated activation to a 16-bit dtype before it rotates it as well, for its
    tensor cores. The bytes of a token do not depend on the other tokens or on the number of threads. It has
    gradients of any order, which are computed in fp32, but none with `ends`. Raises ValueError for other
    shapes, dtypes, devices and ends, and NotImplementedError for a derivative in forward mode or a gradient
    with `ends`.
    """
    return torch.ops.drot.swiglu_rotate(gate, up, rotation, ends)


def swiglu_rotate_ref(
    gate: Tensor, up: Tensor, rotation: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """`swiglu_rotate` in plain PyTorch, rounded once; in fp64 for arguments in fp64."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    gated = torch.nn.functional.silu(gate.to(wide)) * up.to(wide)
    if rotation is None:
        return gated.to(gate.dtype)
    if ends is not None:
        parts = (part.split(ends.diff(prepend=ends.new_zeros(1)).tolist()) for part in (gate, up))
        blocks = rotation.unflatten(0, (len(ends), -1))
        return torch.cat([swiglu_rotate_ref(*of_expert) for of_expert in zip(*parts, blocks, strict=True)])
    in_blocks = gated.unflatten(-1, (len(rotation), -1))
    return torch.einsum("...ni,nij->...nj", in_blocks, rotation.to(wide)).flatten(-2).to(gate.dtype)
