"""The tensors of a checkpoint next to their predictions: dense weights, or packed values and positions."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drot.checkpoint.artifact.prediction import Prediction, rows_of_a_piece
from drot.checkpoint.source import Header, read_headers
from drot.core.errors import UserError
from drot.ops import unpack24

#: the name of a tensor in a file of rotations
ROTATION = re.compile(r"layers\.\d+\.r[123]")


def holds_weights(name: str) -> bool:
    """Whether a file holds weights of the model, by its path relative to the folder of the checkpoint."""
    return re.fullmatch(r"model[^/]*\.safetensors", name) is not None


def holds_rotations(file: Path) -> bool:
    """Whether a file is one that `save_rotations_to` wrote, and so holds no weights."""
    if file.suffix != ".safetensors" or not file.is_file():
        return False
    return all(ROTATION.fullmatch(name) for name in read_headers([file]))


def names_of_weight(name: str, stored: Any) -> tuple[str, str | None] | None:
    """The tensors of a checkpoint that hold the weight `name`: a weight, or values and positions.

    stored: the names of the checkpoint's tensors. None if the checkpoint does not hold the weight, as a tied
        lm_head.
    """
    if name in stored:
        return name, None
    values = f"{name.removesuffix('.weight')}.values"
    return (values, f"{name.removesuffix('.weight')}.positions") if values in stored else None


def read_dense(name: str, stored: Mapping[str, Header]) -> Tensor:
    """The weight `name` of a checkpoint, dense. Raises UserError if the checkpoint does not hold it.

    stored: the headers of the checkpoint's tensors.
    """
    names = names_of_weight(name, stored)
    if names is None:
        raise UserError(f"the checkpoint holds no {name}: name a folder that drot prune wrote")
    found = []
    for each in filter(None, names):
        with safe_open(stored[each].file, framework="pt") as handle:
            found.append(handle.get_tensor(each))
    return found[0] if len(found) == 1 else unpack24(*found)


def numbered(prediction: Prediction) -> Iterator[tuple[int, int, Tensor]]:
    """Number, first row and rows of each piece of a prediction."""
    for number, rows in enumerate(prediction.pieces):
        yield number, number * rows_of_a_piece(rows.shape), rows


def at_positions(rows: Tensor, positions: Tensor) -> Tensor:
    """The elements [r, c/2] of `rows` [r, c] at the packed `positions` uint8 [r, c/8].

    Raises ValueError as `unpack24`.
    """
    count = rows.shape[1] // 2
    chosen = unpack24(torch.ones(len(rows), count), positions) == 1
    return rows[chosen].reshape(len(rows), count)
