"""The files of rotations of a run: the file that it uses instead of training, and the file that it writes."""

import itertools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drot.checkpoint.resume import identity_differences, partial_folder
from drot.checkpoint.rotations import (
    ORTHOGONALITY_TOLERANCE,
    open_rotations,
    read_record,
    stored_down_block,
    stored_r1s,
)
from drot.config import Recipe
from drot.core.errors import UserError
from drot.core.files import check_file_name, check_writable
from drot.core.hashes import file_record
from drot.model.rotation import RotationsOfLayers
from drot.pipeline.context import RunContext

logger = logging.getLogger("drot")


@dataclass(frozen=True)
class GivenRotations:
    """The rotation of each layer, read from a file when it is asked for. entry: that of the manifest."""

    rotations: RotationsOfLayers
    entry: dict[str, Any]


def with_given_r3(recipe: Recipe, path: str | Path | None) -> Recipe:
    """`recipe` for the rotations in the file `path`: the file says whether there is an R3, and its blocks.

    Without a `path` it is the same. Raises UserError if the recipe says something else than the file.
    """
    if path is None:
        return recipe
    wanted = recipe.rotation.down_rotation
    if recipe.rotation.mode == "none":
        return recipe  # read_given refuses the file
    held = stored_down_block(Path(path)) or "none"
    if wanted not in ("auto", held):
        raise UserError(
            f"`down_rotation` must be {held}, as in the rotations of {path}; got {wanted}: leave "
            "`down_rotation` out; the rotations stock and light set it, so use layer or shared in their place"
        )
    return recipe.replace(down_rotation=held)


def read_given(run: RunContext, path: Path) -> GivenRotations:
    """The rotations in the file `path`, which `save_rotations_to` wrote.

    Raises UserError for a file that does not fit the model or the recipe of the run.
    """
    if not run.rotates:
        raise UserError(
            '`rotations` need `mode="layer"` or `mode="shared"`; got `mode="none"`, which rotates nothing'
        )
    rotations, record = open_rotations(path, run.model)
    shared, sharing = run.recipe.rotation.mode == "shared", run.bases.sharing
    pairs = itertools.pairwise(stored_r1s(path))  # read only as far as they are compared
    changes = (index for index, pair in enumerate(pairs) if not torch.equal(*pair))
    first = next(changes, None)
    if shared and first is not None:
        raise UserError(
            f'`mode="shared"` needs one R1 for all layers; {path} holds a different R1 for each layer: '
            'use `mode="layer"`'
        )
    if first is None and run.bases.layers > 1 and run.bases.place in ("input", "residual"):
        logger.warning(
            "%s holds one R1 for all layers, and the layers then multiply by an identity: use "
            '`mode="shared"`, which computes the same without it',
            path,
        )
    found = changes if first is None else itertools.chain([first], changes)
    wrong = (index for index in found if not run.bases.ends_segment(index))
    if sharing > 1 and (index := next(wrong, None)) is not None:
        raise UserError(
            f"`layers_per_rotation` {sharing} needs the same R1 in {sharing} consecutive layers; {path} has "
            f"another R1 in layer {index + 1} than in layer {index}: leave it out"
        )
    if run.model.family.layer_norm:
        error = max(float((r1.double().sum(1) - 1).abs().amax()) for r1 in stored_r1s(path))
        if error > ORTHOGONALITY_TOLERANCE:
            raise UserError(
                f"{path} must hold an R1 with R1 1 = 1 for a model with LayerNorm, got an error of "
                f"{error:.1e}: train the rotations on this model"
            )
    entry = {"file": path.name, "sha256": file_record(path).sha256, "trained_with": record}
    return GivenRotations(rotations, entry)


def check_rotations_output(
    file: Path, recipe: Recipe, out: Path | None, *, resume: bool, dry_run: bool = False
) -> None:
    """Raises UserError if the rotations of a run cannot be written to `file`.

    resume: whether the run may be a resumed run, which may have written `file` already.
    dry_run: as for `check_writable`.
    """
    if recipe.rotation.mode == "none":
        raise UserError(
            '`save_rotations_to` needs `mode="layer"` or `mode="shared"`; got `mode="none"`, which trains no '
            "rotations"
        )
    check_file_name(file)
    if os.path.exists(file) and (file.is_dir() or not resume):
        raise UserError(f"{file} exists: name another `save_rotations_to` or remove it")
    if out is not None and path_inside(file, partial_folder(out)) is not None:
        raise UserError(f"{file} lies in the folder of the unfinished run: name another `save_rotations_to`")
    inside = path_inside(file, out)
    if inside is None:
        check_writable(file, dry_run=dry_run)
    elif inside.suffix != ".safetensors" or inside.name.startswith("model"):
        raise UserError(
            f"`save_rotations_to` inside `out` must be a .safetensors file whose name does not begin with "
            f"model, got {inside}: name it rotations.safetensors"
        )


def check_same_rotations(file: Path, identity: dict[str, Any]) -> None:
    """Raises UserError if `file` exists and another run has written it than the one with `identity`."""
    if not file.exists():
        return
    record = read_record(file)
    before = {key: value for key, value in record.items() if key != "model"}
    if identity_differences(before, identity, "the file"):
        raise UserError(
            f"{file} holds the rotations of another run: name another `save_rotations_to` or remove it"
        )


def path_inside(file: Path | None, folder: Path | None) -> Path | None:
    """The path of `file` relative to `folder`; None if it lies elsewhere."""
    if file is None or folder is None or not file.resolve().is_relative_to(folder.resolve()):
        return None
    return file.resolve().relative_to(folder.resolve())
