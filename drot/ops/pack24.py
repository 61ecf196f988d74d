"""`pack24`, `unpack24`: 2:4 weights as values and two-bit positions, 9/16 of the bytes in bf16."""

import torch
from torch import Tensor

from drot import _extension as _extension


def pack24(w: Tensor) -> tuple[Tensor, Tensor]:
    """Packs a 2:4 weight.

    w: [r, c], bf16, fp16 or fp32, c a multiple of 8, at most two non-zeros in each four neighbours
    of a row. Returns values [r, c/2] in w's dtype and positions uint8 [r, c/8]: four two-bit
    positions a byte, the lower bits first, ascending in each group. A group with fewer than two
    non-zeros stores zeros. -0.0 counts as zero, and comes back as 0.0 or -0.0.
    ValueError names the first row that is not 2:4.
    """
    values, positions = torch.ops.drot.pack24(w)
    return values, positions


def unpack24(values: Tensor, positions: Tensor) -> Tensor:
    """The dense weight [r, c] from `pack24`'s values [r, c/2] and positions [r, c/8].

    ValueError names the first row whose positions do not ascend.
    """
    w: Tensor = torch.ops.drot.unpack24(values, positions)
    return w


def pack24_ref(w: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch form of `pack24`."""
    r, c = w.shape
    groups = w.reshape(r, c // 4, 4)
    # non-zeros first, in their order; the stable sort keeps the lower position of equals first
    chosen = (groups == 0).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :2].sort(dim=-1).values
    if c and (groups != 0).sum(-1).max() > 2:
        raise ValueError("w must hold at most 2 non-zeros in each 4 neighbours")
    values = groups.gather(-1, chosen).reshape(r, c // 2)
    shifts = torch.tensor([0, 2, 4, 6], device=w.device)
    positions = (chosen.reshape(r, c // 8, 4) << shifts).sum(-1).to(torch.uint8)
    return values, positions


def unpack24_ref(values: Tensor, positions: Tensor) -> Tensor:
    """Plain PyTorch form of `unpack24`."""
    r, half = values.shape
    shifts = torch.tensor([0, 2, 4, 6], device=values.device)
    chosen = ((positions.long().unsqueeze(-1) >> shifts) & 3).reshape(r, half // 2, 2)
    out = values.new_zeros(r, half // 2, 4)
    return out.scatter_(-1, chosen, values.reshape(r, half // 2, 2)).reshape(r, 2 * half)


@torch.library.register_fake("drot::pack24")
def _(w: Tensor) -> tuple[Tensor, Tensor]:
    r, c = w.shape
    return w.new_empty(r, c // 2), w.new_empty(r, c // 8, dtype=torch.uint8)


@torch.library.register_fake("drot::unpack24")
def _(values: Tensor, positions: Tensor) -> Tensor:
    return values.new_empty(values.shape[0], 2 * values.shape[1])
