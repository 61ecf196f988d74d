"""The manifest of a checkpoint, drot.json: the recipe, the machine, the versions and the figures."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drot.architectures import Architecture, layer_linears
from drot.calibration.data import calibration_hash
from drot.config import PruningConfig, Recipe
from drot.devices import dtype_name
from drot.environment import device_name, versions
from drot.errors import UserError
from drot.schemas.manifest import FinetunedManifest, PrunedManifest
from drot.schemas.reading import check_schema, read_json, shortened
from drot.sparse.packed import dense_linears

MANIFEST = "drot.json"
FORMAT_VERSION = 1


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes `data` to the file `path` through a temporary file, so that `path` is never incomplete."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_manifest(path: Path | str, *, recipe_needed: bool = True) -> dict[str, Any]:
    """The manifest in the checkpoint folder `path`, checked by its schema (drot/schemas.py).

    Raises UserError if the manifest is missing or broken.

    recipe_needed: whether to refuse the manifest of a model that another program pruned and drot fine-tuned.
    """
    file = Path(path) / MANIFEST
    if not file.exists():
        raise UserError(f"{path} holds no {MANIFEST}: name a folder that drot prune wrote")
    manifest = read_json(file)
    if (version := manifest.get("format_version")) != FORMAT_VERSION:
        raise UserError(
            f"{file} must be of format_version {FORMAT_VERSION}, got {shortened(version)}: "
            "use the version of drot that wrote it"
        )
    elsewhere = "recipe" not in manifest and "finetune" in manifest
    check_schema(FinetunedManifest if elsewhere else PrunedManifest, manifest, str(file))
    if elsewhere and recipe_needed:
        raise UserError(f"{path} was pruned by another program and fine-tuned by drot: name its original")
    return manifest


def patterns_of(manifest: dict[str, Any]) -> PruningConfig:
    """The sparsity of every linear of the model that `manifest` belongs to.

    The other settings of the pruning are not those of the manifest. Manifests of older versions have neither
    `keep` nor `sparsity_of`.
    """
    pruning = manifest["recipe"]["pruning"]
    return PruningConfig(
        method="magnitude",  # with which any m goes
        sparsity=pruning["sparsity"],
        keep=pruning.get("keep", ()),
        sparsity_of=pruning.get("sparsity_of", ()),
    )


def dense_linears_of(path: Path | str, config: Any) -> list[str]:
    """The linears that the checkpoint `path` leaves dense when it is packed, by its manifest.

    It leaves none where the manifest names one sparsity for all linears, and without a manifest. Raises
    UserError if no linear is 2:4.
    """
    if not (Path(path) / MANIFEST).exists():
        return []
    pruning = patterns_of(read_manifest(path))
    return dense_linears(config, pruning) if pruning.mixed else []


def manifest(
    recipe: Recipe, tokens: Tensor, device: torch.device, dtype: torch.dtype, **figures: Any
) -> dict[str, Any]:
    """The manifest of a run in plain JSON types.

    Args:
        recipe: the settings of the run.
        tokens: the calibration tokens, of which the manifest records the shape and the SHA-256.
        device: the device that the run used.
        dtype: dtype of the saved weights.
        figures: further entries, such as the figures of each layer.
    """
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
    """The share of zeros among the weights of the pruned linears, in [0, 1]."""
    zeros = total = 0
    for layer in layers:
        for linear in layer_linears(layer, arch).values():
            zeros += int((linear.weight == 0).sum())
            total += linear.weight.numel()
    return zeros / total
