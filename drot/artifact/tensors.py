"""The tensors of a checkpoint next to their predictions: dense weights, or packed values and positions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.artifact.prediction import Prediction, rows_of_a_piece

#: dtypes of weights in a safetensors file
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
#: bit positions of the four 2-bit positions in a byte (drot/ops/pack24.py)
SHIFTS = (0, 2, 4, 6)


def holds_weights(file: Path) -> bool:
    """Whether a file of a checkpoint holds the weights of the model."""
    return file.name.startswith("model") and file.suffix == ".safetensors"


def stored_names(name: str, stored: Any) -> tuple[str, str | None] | None:
    """The tensors of a checkpoint that hold the weight `name`: a weight, or values and positions.

    stored: the names of the checkpoint's tensors. None if the checkpoint does not hold the weight, as a tied
        lm_head.
    """
    if name in stored:
        return name, None
    values = f"{name.removesuffix('.weight')}.values"
    return (values, f"{name.removesuffix('.weight')}.positions") if values in stored else None


def numbered(prediction: Prediction) -> Iterator[tuple[int, int, Tensor]]:
    """Number, first row and rows of each piece of a prediction."""
    for number, rows in enumerate(prediction.pieces):
        yield number, number * rows_of_a_piece(rows.shape), rows


def at_positions(rows: Tensor, positions: Tensor) -> Tensor:
    """The elements [r, c/2] of `rows` [r, c] at the packed `positions` uint8 [r, c/8]."""
    shifts = torch.tensor(SHIFTS)
    chosen = ((positions.long().unsqueeze(-1) >> shifts) & 3).flatten(1)
    groups = torch.arange(rows.shape[1] // 4).repeat_interleave(2)
    return rows.gather(1, chosen + 4 * groups)
