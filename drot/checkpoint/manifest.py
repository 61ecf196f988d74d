"""The manifest of a checkpoint, drot.json: what was done to the model, where, and with which figures."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drot.architectures import Architecture, layer_linears
from drot.calibration.data import calibration_hash
from drot.config import Recipe
from drot.devices import dtype_name
from drot.environment import device_name, versions
from drot.errors import UserError

MANIFEST = "drot.json"
FORMAT_VERSION = 1
#: keys that every manifest has
MANIFEST_KEYS = ("versions", "recipe", "calibration", "sparsity", "seconds", "layers", "base_model")


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes `data` whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_manifest(path: Path | str) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises UserError where there is none or it is broken."""
    file = Path(path) / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path} holds no {MANIFEST}: it is not a checkpoint of drot prune") from None
    except ValueError as error:  # no JSON, or not UTF-8
        raise UserError(f"{file} is not valid JSON ({error}): was it cut off?") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{file} must be of format_version {FORMAT_VERSION}, got {version}: another drot wrote it"
        )
    if missing := [key for key in MANIFEST_KEYS if key not in manifest]:
        raise UserError(f"{file} lacks {', '.join(missing)}: was it edited?")
    return manifest


def manifest(
    recipe: Recipe, tokens: Tensor, device: torch.device, dtype: torch.dtype, **figures: Any
) -> dict[str, Any]:
    """Plain JSON types: what was asked for and where it ran, then the `figures` of the run."""
    return {
        "format_version": FORMAT_VERSION,
        "versions": versions(),
        "device": device_name(device),
        "dtype": dtype_name(dtype),
        "recipe": recipe.to_dict(),
        "calibration": {"sha256": calibration_hash(tokens), "shape": list(tokens.shape)},
        **figures,
    }


def zero_share(layers: nn.ModuleList, arch: Architecture) -> float:
    """Zeros among the weights of the linears that were pruned."""
    zeros = total = 0
    for layer in layers:
        for linear in layer_linears(layer, arch).values():
            zeros += int((linear.weight == 0).sum())
            total += linear.weight.numel()
    return zeros / total
