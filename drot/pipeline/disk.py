"""The space that a run of `drot.prune` needs on the disk of its output."""

import torch

from drot.config import ResolvedRecipe
from drot.pipeline.estimate import Sizes, rotation_bytes
from drot.pipeline.importance import map_bytes
from drot.sparse.packed import PACKED


def disk_needs(
    sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype, save_dtype: torch.dtype
) -> tuple[int, int]:
    """The bytes of the checkpoint, and of the parts of the run that lie next to it until it is written.

    The parts hold the layers in the `dtype` of the computation, the maps of the linears, and the rotations in
    fp64, twice if they are trained before the pruning begins. Headers, tokenizer and manifest are left out:
    they are small.
    """
    rotation, pruning, layers = recipe.rotation, recipe.pruning, len(sizes.names)
    rotates = rotation.mode != "none"
    boundaries = (layers - 1) * sizes.hidden**2 if rotation.mode == "layer" else 0
    head = sizes.tied_head if rotates else 0  # a rotation unties it
    checkpoint = (sizes.weights + head + boundaries) * save_dtype.itemsize
    of_linear = [
        (pruning.sparsity_for(name), sizes.shapes[role])
        for names in sizes.names
        for role, name in names.items()
    ]
    if recipe.format == "packed":  # half of the values, and 4 bits for each group of 4
        packed = sum(rows * columns for sparsity, (rows, columns) in of_linear if sparsity == PACKED)
        checkpoint -= packed * save_dtype.itemsize // 2 - packed // 8
    parts = layers * sizes.layer_weights * dtype.itemsize
    if rotates:
        parts += (2 if rotation.hessians == "dense" else 1) * layers * rotation_bytes(sizes)
        if rotation.boundary == "residual":  # the other place is added after the last layer
            parts += boundaries * dtype.itemsize
    if sizes.tokens:
        parts += sum(map_bytes(shape, rotated=rotates) for sparsity, shape in of_linear if sparsity.ratio > 0)
    return checkpoint, parts
