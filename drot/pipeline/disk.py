"""The space that a run of `drot.prune` needs on the disk of its output."""

import math

import torch

from drot.config import ResolvedRecipe, ResolvedRotation
from drot.model.layer import DecoderLayer
from drot.pipeline.importance import map_bytes
from drot.pipeline.memory import rotation_bytes
from drot.pipeline.sizes import Sizes
from drot.sparse.packed import PACKABLE


def disk_needs(
    sizes: Sizes, recipe: ResolvedRecipe, save_dtype: torch.dtype, kept: int | None = None
) -> tuple[int, int]:
    """The bytes of the checkpoint, and of what lies beside it in OUT.partial until the run ends.

    Beside the finished layers, which become shards of the checkpoint, lie the maps of the linears, the
    weights of the tokens, the rotations in fp64, and the layers before they are trained together. Headers,
    tokenizer and manifest, which are small, are left out.

    kept: of a model that reads images too, the bytes that it has beside its language model (`kept_bytes`).
    """
    rotation, pruning, layers = recipe.rotation, recipe.pruning, sizes.layers
    rotates, count = rotation.mode != "none", len(layers)
    of_layers = (count - 1) // rotation.layers_per_rotation if sizes.rotates_stream else count
    held = {"none": 0, "shared": 0, "layer": of_layers}[rotation.mode]
    boundaries = held * sizes.hidden**2
    of_down = sum(layer.down_inputs() for layer in layers) * (rotation.down_block or 0)  # R3 of all layers
    head = sizes.untied_head if rotates else 0
    checkpoint = (sizes.weights + head + boundaries + of_down) * save_dtype.itemsize
    checkpoint += sizes.in_fp32.get(save_dtype, 0) * (torch.float32.itemsize - save_dtype.itemsize)
    if recipe.format == "packed":  # half of the values, and 4 bits for each group of 4
        packed = sum(
            math.prod(layer.shape_of(linear.spec))
            for layer in layers
            for linears in layer.modules
            if all(pruning.sparsity_for(linear.full_name) == PACKABLE for linear in linears)
            for linear in linears
        )
        checkpoint -= packed * save_dtype.itemsize // 2 - packed // 8
    beside = 0
    if kept is not None:  # the embedding, the last norm and the head are written alone, then with the rest
        checkpoint += kept
        beside += (sizes.outside + head) * save_dtype.itemsize
    if recipe.recovery.distill_epochs:  # the layers as they were pruned, not packed
        beside += (sizes.weights - sizes.outside + boundaries + of_down) * save_dtype.itemsize
    if rotates:
        beside += sum(rotation_bytes(layer, rotation.down_block) for layer in layers)
    if sizes.tokens:
        beside += sum(
            map_bytes(layer.shape_of(layer.linears[name].spec), rotated=rotates)
            for layer, pruned in zip(layers, sizes.pruned(recipe), strict=True)
            for name in pruned
        )
        if recipe.pruning.token_weights == "gradient":
            beside += sum(weights_bytes(layer, sizes.tokens) for layer in layers)
    return checkpoint, beside


def rotations_file_bytes(sizes: Sizes, rotation: ResolvedRotation) -> int:
    """The bytes of the file of `save_rotations_to`, whose disk holds as much again while it is written."""
    if rotation.mode == "none":
        return 0
    in_fp64 = sum(rotation_bytes(layer, rotation.down_block) for layer in sizes.layers)
    return in_fp64 * torch.float32.itemsize // torch.float64.itemsize


def weights_bytes(layer: DecoderLayer, tokens: int) -> int:
    """The bytes of the weights of the tokens, of which all experts have the same, and of the outputs of one
    layer, of which experts have none."""
    groups = {group.name if group.expert is None else None for group in layer.groups}
    linears = (linear for group in layer.groups if group.expert is None for linear in group.linears)
    outputs = sum(layer.shape_of(linear)[0] for linear in linears)
    return torch.float16.itemsize * tokens * len(groups) + torch.float32.itemsize * outputs
