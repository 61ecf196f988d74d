"""`pack24`, `unpack24`: a 2:4 weight as values and two-bit positions, in bf16 9/16 of the dense bytes."""

import torch
from torch import Tensor


def pack24(w: Tensor) -> tuple[Tensor, Tensor]:
    """A 2:4 weight -> its non-zero values and their positions in each group of four columns.

    w: [r, c], bf16, fp16 or fp32, c a multiple of 8, with at most two non-zeros in each group of a row.
    Returns values [r, c/2] in w's dtype and positions uint8 [r, c/8]. A byte holds four two-bit positions,
    the first in the lowest bits; the two positions of a group ascend. A group with fewer than two non-zeros
    stores zeros. -0.0 counts as zero: `unpack24` gives 0.0 or -0.0 for it.

    Raises ValueError for other shapes or dtypes, and for a weight that is not 2:4, naming its first faulty
    row.
    """
    return torch.ops.drot.pack24(w)


def unpack24(values: Tensor, positions: Tensor) -> Tensor:
    """The inverse of `pack24`: values [r, c/2], positions uint8 [r, c/8] -> the dense weight [r, c].

    Raises ValueError for other shapes or dtypes, and for positions that do not ascend in a group, naming the
    first faulty row.
    """
    return torch.ops.drot.unpack24(values, positions)


def pack24_ref(w: Tensor) -> tuple[Tensor, Tensor]:
    """`pack24` in plain PyTorch."""
    r, c = w.shape
    groups = w.reshape(r, c // 4, 4)
    # the stable sort puts the non-zeros first, and then the zeros, each in ascending order
    chosen = (groups == 0).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :2].sort(dim=-1).values
    if c and (groups != 0).sum(-1).max() > 2:
        raise ValueError("w must hold at most 2 non-zeros in each 4 neighbours")
    values = groups.gather(-1, chosen).reshape(r, c // 2)
    shifts = torch.tensor([0, 2, 4, 6], device=w.device)
    positions = (chosen.reshape(r, c // 8, 4) << shifts).sum(-1).to(torch.uint8)
    return values, positions


def unpack24_ref(values: Tensor, positions: Tensor) -> Tensor:
    """`unpack24` in plain PyTorch."""
    r, half = values.shape
    shifts = torch.tensor([0, 2, 4, 6], device=values.device)
    chosen = ((positions.long().unsqueeze(-1) >> shifts) & 3).reshape(r, half // 2, 2)
    out = values.new_zeros(r, half // 2, 4)
    return out.scatter_(-1, chosen, values.reshape(r, half // 2, 2)).reshape(r, 2 * half)
