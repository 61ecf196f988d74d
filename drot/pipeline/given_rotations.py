"""The rotations of a file, which a run uses instead of training its own."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drot.checkpoint.rotations import load_rotations
from drot.errors import UserError
from drot.pipeline.context import RunContext
from drot.surgery.rotate import LayerRotation


@dataclass(frozen=True)
class GivenRotations:
    """The rotations of all layers, from a file.

    rotations: the rotation of each layer.
    entry: `rotations_file` of the manifest: the file's name, its SHA-256, and the record that was saved with
        the rotations.
    """

    rotations: list[LayerRotation]
    entry: dict[str, Any]


def read_given(run: RunContext, path: Path) -> GivenRotations:
    """The rotations in the file `path`, which `save_rotations_to` wrote.

    Raises UserError for a file that does not fit the model or the recipe of the run.
    """
    if not run.rotates:
        raise UserError(
            '`rotations` need `mode="layer"` or `mode="shared"`; got `mode="none"`, which rotates nothing'
        )
    rotations, record = load_rotations(
        path, layers=len(run.layers), hidden_size=run.model.config.hidden_size, shape=run.shape
    )
    equal = all(torch.equal(rotation.r1, rotations[0].r1) for rotation in rotations)
    if run.recipe.rotation.mode == "shared" and not equal:
        raise UserError(
            f'`mode="shared"` needs one R1 for all layers; {path} holds a different R1 for each layer: '
            'use `mode="layer"`'
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return GivenRotations(rotations, {"file": path.name, "sha256": digest, "trained_with": record})
