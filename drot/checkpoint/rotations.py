"""Rotation files: trained rotations of a model, which can be used again for other sparsities and methods."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drot.core.errors import UserError
from drot.core.files import new_file
from drot.core.hashes import DIGEST, json_digest, parts_digest
from drot.core.reading import check_regular, parse_json
from drot.machine.spool import Spool
from drot.model.decoder import DecoderModel
from drot.model.rotation import LayerRotation, RotationsOfLayers, orthogonality_error, reorthogonalize

#: largest allowed max |QᵀQ - I| of a stored matrix; rounding a large matrix to fp32 gives about 1e-6
ORTHOGONALITY_TOLERANCE = 1e-3
FIRST_R3 = "layers.0.r3"


def save_rotations(path: Path, rotations: Iterable[LayerRotation], record: dict[str, Any]) -> None:
    """Writes the rotations of all layers in fp32. Raises WriteError if writing fails.

    rotations: those of the layers in order. They are asked for one by one; their fp32 copies lie on the disk
        of the file until it is written.
    record: the recipe, the model and the calibration. The file's metadata holds it, and a digest of it and of
        the tensors.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors, spool = dict[str, Tensor](), Spool(path.parent)
    for index, rotation in enumerate(rotations):
        for name, tensor in rotation.tensors(f"layers.{index}.", torch.float32).items():
            tensors[name] = spool.empty(tensor.shape, tensor.dtype).copy_(tensor)
    # one key only: safetensors writes several keys in a random order, and equal runs write equal files
    metadata = {"record": json.dumps(record | {DIGEST: _digest([tensors], record)})}
    with new_file(path) as part:
        save_file(tensors, part, metadata=metadata)


def _digest(tensors: Iterable[Mapping[str, Tensor]], record: dict[str, Any]) -> str:
    return json_digest([parts_digest(tensors), record])


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open file `path`. Raises UserError if it is missing or broken."""
    if not os.path.exists(path):
        raise UserError(f"there is no rotation file {path}: write one with `save_rotations_to`")
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except UserError:  # of the caller
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}): copy it again") from None


def stored_down_block(path: Path) -> int | None:
    """The size of the blocks of R3 in a rotation file; None if it holds no R3.

    Raises UserError if the file is missing or broken.
    """
    with _opened(path) as handle:
        if FIRST_R3 not in handle.keys():  # noqa: SIM118
            return None
        shape: list[int] = handle.get_slice(FIRST_R3).get_shape()
        if len(shape) != 3 or shape[-1] < 2:
            raise UserError(
                f"{path}: {FIRST_R3} must be blocks [count, size, size], got {shape}: the file is damaged; "
                "copy it again"
            )
        return shape[-1]


def read_record(path: Path) -> dict[str, Any]:
    """The record of a rotation file, whose tensors are read one after the other and compared with its digest.

    Raises UserError if the file is missing or broken, holds anything but fp32, or does not fit its digest.
    """
    with _opened(path) as handle:
        content = (handle.metadata() or {}).get("record", "{}")
        for name in handle.keys():  # noqa: SIM118
            if (dtype := handle.get_slice(name).get_dtype()) != "F32":
                raise UserError(f"{path}: {name} must be of dtype F32, got {dtype}")
        record = parse_json(content.encode(), f"{path}: its record")
        tensors = ({name: handle.get_tensor(name)} for name in handle.keys())  # noqa: SIM118
        if record.pop(DIGEST, None) != _digest(tensors, record):
            raise UserError(f"{path} is damaged: its content does not fit its digest; copy it again")
    return record


def open_rotations(path: Path, model: DecoderModel) -> tuple[RotationsOfLayers, dict[str, Any]]:
    """The rotation of each layer, which is read when it is asked for, and the record saved with them.

    The matrices are fp64, and orthogonalised again, because the file has them in fp32. Raises UserError if
    the file is missing, broken or damaged, has another shape than `model`, or holds a matrix that is not
    orthogonal.
    """
    record = read_record(path)
    block, layers = stored_down_block(path), len(model.layers)
    expected = {}
    for index, layer in enumerate(model.layers):
        expected[f"layers.{index}.r1"] = [model.hidden_size, model.hidden_size]
        expected[f"layers.{index}.r2"] = [layer.heads.kv_heads, layer.heads.head_dim, layer.heads.head_dim]
        if block is not None:
            expected[f"layers.{index}.r3"] = [layer.down_inputs() // block, block, block]
    with _opened(path) as handle:
        found = {name: handle.get_slice(name).get_shape() for name in handle.keys()}  # noqa: SIM118
        for name, size in expected.items():
            if (got := found.get(name)) != size:
                raise UserError(
                    f"{path}: {name} must be {size} for this model, got {got}: use a file of this model"
                )
        if len(found) != len(expected):
            held = sum(name.endswith(".r1") for name in found)
            raise UserError(
                f"{path} holds {held} layers, but this model has {layers}: use a file of this model"
            )
        for name in found:
            if not (deviation := orthogonality_error(handle.get_tensor(name))) < ORTHOGONALITY_TOLERANCE:
                raise UserError(
                    f"{path}: {name} must be orthogonal, got max |QᵀQ - I| = {deviation:.1e}: "
                    "the file is damaged; copy it again"
                )
    return RotationsOfLayers(partial(_read_layer, path), range(layers)), record


def stored_r1s(path: Path) -> Iterator[Tensor]:
    """The fp32 R1 [d, d] of each layer in a rotation file that `open_rotations` has opened before."""
    with _opened(path) as handle:
        for index in range(sum(name.endswith(".r1") for name in handle.keys())):  # noqa: SIM118
            yield handle.get_tensor(f"layers.{index}.r1")


def _read_layer(path: Path, index: int) -> LayerRotation:
    prefix = f"layers.{index}."
    with _opened(path) as handle:
        own = [name for name in handle.keys() if name.startswith(prefix)]  # noqa: SIM118
        tensors = {name: reorthogonalize(handle.get_tensor(name)) for name in own}
    return LayerRotation.from_tensors(tensors, prefix)
