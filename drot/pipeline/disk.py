"""The space that a run of `drot.prune` needs on the disk of its output."""

from pathlib import Path

import torch

from drot.model.families import layer_linears, module_at
from drot.pipeline.context import RunContext
from drot.pipeline.figures import figure_bytes
from drot.sparse.packed import dense_linears


def disk_needs(run: RunContext, save_dtype: torch.dtype, format: str, partial: Path) -> tuple[int, int]:
    """The bytes of the checkpoint, and of the parts of the run that are not in `partial` yet.

    The parts hold the layers in the dtype of the computation, the figures of the linears, and the rotations
    in fp64, twice if they are trained before the pruning begins. Headers, tokenizer and manifest are left
    out: they are small.

    Args:
        run: the state of the run, before it begins.
        save_dtype: dtype of the saved weights.
        format: format of the saved weights.
        partial: the folder of the parts of an unfinished run.
    """
    layers, hidden = run.layers, run.model.config.hidden_size
    rotation = run.recipe.rotation
    weights = sum(p.numel() for p in run.model.parameters())
    embedding, head = (module_at(run.model, path).weight for path in (run.arch.embedding, run.arch.lm_head))
    if run.rotates and head is embedding:
        weights += head.numel()
    boundaries = 0
    if rotation.mode == "layer":
        boundaries = (len(layers) - 1) * hidden**2
    checkpoint = (weights + boundaries) * save_dtype.itemsize
    if format == "packed":
        checkpoint -= _saved_by_packing(run, save_dtype)
    parts = sum(p.nbytes for layer in layers for p in layer.parameters())
    if run.rotates:
        of_a_layer = 8 * (hidden**2 + run.shape.kv_heads * run.shape.head_dim**2)
        copies = 2 if rotation.hessians == "dense" else 1
        parts += copies * len(layers) * of_a_layer
        if rotation.boundary == "residual":  # the other place is added after the last layer
            parts += boundaries * run.dtype.itemsize
    if len(run.tokens):
        parts += sum(
            figure_bytes(tuple(linear.weight.shape), rotated=run.rotates)
            for index, layer in enumerate(layers)
            for role, linear in layer_linears(layer, run.arch).items()
            if run.recipe.pruning.sparsity_for(run.arch.linear_names(index)[role]).ratio > 0
        )
    done = sum(file.stat().st_size for file in partial.glob("*.safetensors"))
    return checkpoint, max(0, parts - done)


def _saved_by_packing(run: RunContext, dtype: torch.dtype) -> int:
    """The bytes by which the packed format is smaller: half of the values, less 4 bits a group of 4."""
    dense = set(dense_linears(run.model.config, run.recipe.pruning))
    packed = sum(
        linear.weight.numel()
        for index, layer in enumerate(run.layers)
        for role, linear in layer_linears(layer, run.arch).items()
        if run.arch.linear_names(index)[role] not in dense
    )
    return packed * dtype.itemsize // 2 - packed // 8
