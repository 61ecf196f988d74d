"""The space that a run of `drot.prune` needs on the disk of its output."""

import math

import torch

from drot.config import ResolvedRecipe, ResolvedRotation
from drot.model.family import by_module
from drot.pipeline.importance import map_bytes
from drot.pipeline.memory import rotation_bytes
from drot.pipeline.sizes import Sizes
from drot.sparse.packed import PACKABLE


def disk_needs(sizes: Sizes, recipe: ResolvedRecipe, save_dtype: torch.dtype) -> tuple[int, int]:
    """The bytes of the checkpoint, and of what lies beside it in OUT.partial until the run ends.

    Beside the finished layers, which become shards of the checkpoint, lie the maps of the linears, the
    weights of the tokens, the rotations in fp64, and the layers before they are trained together. Headers,
    tokenizer and manifest, which are small, are left out.
    """
    rotation, pruning, layers = recipe.rotation, recipe.pruning, len(sizes.names)
    rotates = rotation.mode != "none"
    of_layers = (layers - 1) // rotation.layers_per_rotation if sizes.rotates_stream else layers
    held = {"none": 0, "shared": 0, "layer": of_layers}[rotation.mode]
    boundaries = held * sizes.hidden**2
    of_down = sum(map(sizes.down_inputs, sizes.shapes_in)) * (rotation.down_block or 0)  # R3 of all layers
    head = sizes.untied_head if rotates else 0
    checkpoint = (sizes.weights + head + boundaries + of_down) * save_dtype.itemsize
    checkpoint += sizes.in_fp32.get(save_dtype, 0) * (torch.float32.itemsize - save_dtype.itemsize)
    of_linear = [
        (pruning.sparsity_for(name), shapes[role])
        for names, shapes in zip(sizes.names, sizes.shapes_in, strict=True)
        for role, name in names.items()
    ]
    if recipe.format == "packed":  # half of the values, and 4 bits for each group of 4
        packed = sum(
            math.prod(shapes[linear.name])
            for names, shapes in zip(sizes.names, sizes.shapes_in, strict=True)
            for linears in by_module(each for group in sizes.groups_of(names) for each in group.linears)
            if all(pruning.sparsity_for(names[linear.name]) == PACKABLE for linear in linears)
            for linear in linears
        )
        checkpoint -= packed * save_dtype.itemsize // 2 - packed // 8
    beside = 0
    if recipe.recovery.distill_epochs:  # the layers as they were pruned, not packed
        beside += (sizes.weights - sizes.outside + boundaries + of_down) * save_dtype.itemsize
    if rotates:
        beside += sum(rotation_bytes(sizes, each, rotation.down_block) for each in sizes.shapes_in)
    if sizes.tokens:
        beside += sum(
            map_bytes(shape, rotated=rotates) for sparsity, shape in of_linear if sparsity.ratio > 0
        )
        if recipe.pruning.token_weights == "gradient":
            beside += sum(map(weights_bytes, map(sizes.of_layer, range(layers))))
    return checkpoint, beside


def rotations_file_bytes(sizes: Sizes, rotation: ResolvedRotation) -> int:
    """The bytes of the file of `save_rotations_to`, whose disk holds as much again while it is written."""
    if rotation.mode == "none":
        return 0
    in_fp64 = sum(rotation_bytes(sizes, each, rotation.down_block) for each in sizes.shapes_in)
    return in_fp64 * torch.float32.itemsize // torch.float64.itemsize


def weights_bytes(sizes: Sizes) -> int:
    """The bytes of the weights of the tokens, of which all experts have the same, and of the outputs of one
    layer, of which experts have none."""
    groups = {group.name if group.expert is None else None for group in sizes.groups}
    linears = (linear for group in sizes.groups if group.expert is None for linear in group.linears)
    outputs = sum(sizes.shapes[linear.name][0] for linear in linears)
    return torch.float16.itemsize * sizes.tokens * len(groups) + torch.float32.itemsize * outputs
