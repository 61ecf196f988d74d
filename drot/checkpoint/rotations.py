"""Rotation files: trained rotations of a model, which can be used again for other sparsities and methods."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drot.core.errors import UserError
from drot.core.files import new_file
from drot.core.hashes import DIGEST, json_digest, tensors_digest
from drot.model.families import HeadShape
from drot.model.rotation import LayerRotation, orthogonality_error, reorthogonalize

#: largest allowed max |QᵀQ - I| of a stored matrix; rounding a large matrix to fp32 gives about 1e-6
ORTHOGONALITY_TOLERANCE = 1e-3


def save_rotations(path: Path, rotations: list[LayerRotation], record: dict[str, Any]) -> None:
    """Writes the rotations of all layers in fp32. Raises WriteError if writing fails.

    record: the recipe, the model and the calibration. The file's metadata holds it, and a digest of it and of
        the tensors.
    """
    tensors: dict[str, Tensor] = {}
    for index, rotation in enumerate(rotations):
        tensors |= rotation.tensors(f"layers.{index}.", torch.float32)
    # one key only: safetensors writes several keys in a random order, and equal runs write equal files
    metadata = {"record": json.dumps(record | {DIGEST: _digest(tensors, record)})}
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as part:
        save_file(tensors, part, metadata=metadata)


def _digest(tensors: dict[str, Tensor], record: dict[str, Any]) -> str:
    return json_digest([tensors_digest(tensors), record])


def read_rotations(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the record of a rotation file, as they are in the file.

    Raises UserError if the file is missing or broken, or does not fit its digest.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
            record = json.loads((handle.metadata() or {}).get("record", "{}"))
    except FileNotFoundError:
        raise UserError(f"there is no rotation file {path}: write one with `save_rotations_to`") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}): copy it again") from None
    if not isinstance(record, dict):
        raise UserError(
            f"{path}: its record must be a JSON object, got {type(record).__name__}: copy it again"
        )
    if record.pop(DIGEST, None) != _digest(tensors, record):
        raise UserError(f"{path} is damaged: its content does not fit its digest; copy it again")
    return tensors, record


def load_rotations(
    path: Path, *, layers: int, hidden_size: int, shape: HeadShape
) -> tuple[list[LayerRotation], dict[str, Any]]:
    """The rotations of each layer and the record that was saved with them.

    The matrices are fp64, and orthogonalised again, because the file has them in fp32. Raises UserError if
    the file is missing, broken or damaged, has another shape than this model, or holds a matrix that is not
    orthogonal.
    """
    tensors, record = read_rotations(path)
    expected = {}
    for index in range(layers):
        expected[f"layers.{index}.r1"] = [hidden_size, hidden_size]
        expected[f"layers.{index}.r2"] = [shape.kv_heads, shape.head_dim, shape.head_dim]
    for name, size in expected.items():
        got = list(tensors[name].shape) if name in tensors else None
        if got != size:
            raise UserError(
                f"{path}: {name} must be {size} for this model, got {got}: use a file of this model"
            )
    if len(tensors) != len(expected):
        raise UserError(
            f"{path} holds {len(tensors) // 2} layers, but this model has {layers}: use a file of this model"
        )
    for name, tensor in tensors.items():
        if not (deviation := orthogonality_error(tensor)) < ORTHOGONALITY_TOLERANCE:
            raise UserError(
                f"{path}: {name} must be orthogonal, got max |QᵀQ - I| = {deviation:.1e}: "
                "the file is damaged; copy it again"
            )
    tensors = {name: reorthogonalize(tensor) for name, tensor in tensors.items()}
    return [LayerRotation.from_tensors(tensors, f"layers.{index}.") for index in range(layers)], record
