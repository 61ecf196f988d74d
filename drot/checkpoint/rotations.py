"""Trained rotations as a file of their own, reusable for every sparsity and method."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drot.architectures import HeadShape
from drot.errors import UserError
from drot.rotation.retraction import orthogonality_error, reorthogonalize
from drot.surgery.rotate import LayerRotation

#: a stored matrix may be this far from orthogonal (fp32 rounding of a large one is near 1e-6)
ORTHOGONALITY_TOLERANCE = 1e-3


def rotation_tensors(rotations: list[LayerRotation], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """`layers.<i>.r1` [d, d] and `layers.<i>.r2` [kv, h, h] of every layer."""
    tensors = {}
    for index, rotation in enumerate(rotations):
        tensors[f"layers.{index}.r1"] = rotation.r1.to("cpu", dtype, copy=True).contiguous()
        tensors[f"layers.{index}.r2"] = rotation.r2.to("cpu", dtype, copy=True).contiguous()
    return tensors


def rotations_from(tensors: dict[str, Tensor], layers: int) -> list[LayerRotation]:
    """The inverse of `rotation_tensors`."""
    return [LayerRotation(tensors[f"layers.{i}.r1"], tensors[f"layers.{i}.r2"]) for i in range(layers)]


def save_rotations(path: Path, rotations: list[LayerRotation], record: dict[str, Any]) -> None:
    """Writes rotations in fp32, with `record` (recipe, model, calibration) in the file's metadata."""
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(rotation_tensors(rotations, torch.float32), part, metadata={"record": json.dumps(record)})
    part.replace(path)


def load_rotations(
    path: Path, *, layers: int, hidden_size: int, shape: HeadShape
) -> tuple[list[LayerRotation], dict[str, Any]]:
    """Rotations (fp64, orthogonal to rounding) and the record that was saved with them.

    Raises UserError where the file is missing or broken, is of another model's shape, or holds a
    matrix that is not orthogonal.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
            record = json.loads((handle.metadata() or {}).get("record", "{}"))
    except FileNotFoundError:
        raise UserError(f"there is no rotation file {path}; `save_rotations_to` makes one") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from None
    expected = {}
    for index in range(layers):
        expected[f"layers.{index}.r1"] = [hidden_size, hidden_size]
        expected[f"layers.{index}.r2"] = [shape.kv_heads, shape.head_dim, shape.head_dim]
    for name, size in expected.items():
        got = list(tensors[name].shape) if name in tensors else None
        if got != size:
            raise UserError(f"{path}: {name} must be {size} for this model, got {got}")
    if len(tensors) != len(expected):
        raise UserError(f"{path} holds {len(tensors) // 2} layers, this model has {layers}")
    for name, tensor in tensors.items():
        if not (deviation := orthogonality_error(tensor)) < ORTHOGONALITY_TOLERANCE:
            raise UserError(f"{path}: {name} is not orthogonal (max |QᵀQ - I| = {deviation:.1e})")
    return rotations_from({name: reorthogonalize(tensor) for name, tensor in tensors.items()}, layers), record
