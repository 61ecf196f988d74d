"""The space that a run of `drot.prune` needs on the disk of its output."""

from pathlib import Path

import torch

from drot.pipeline.context import RunContext
from drot.pipeline.importance import map_bytes
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
    model, rotation = run.model, run.recipe.rotation
    layers, hidden = len(model.layers), model.hidden_size
    linears = [linear for layer in model.layers for linear in layer.linears.values()]
    weights = sum(p.numel() for p in model.model.parameters())
    if run.rotates and model.head.weight is model.embedding.weight:
        weights += model.head.weight.numel()
    boundaries = sum(run.bases.holds(index) for index in range(layers)) * hidden**2
    checkpoint = (weights + boundaries) * save_dtype.itemsize
    if format == "packed":  # half of the values, less 4 bits a group of 4
        dense = set(dense_linears(model.config, run.recipe.pruning))
        packed = sum(linear.weight.numel() for linear in linears if linear.full_name not in dense)
        checkpoint -= packed * save_dtype.itemsize // 2 - packed // 8
    parts = sum(p.nbytes for layer in model.layers for p in layer.module.parameters())
    if run.rotates:
        of_a_layer = 8 * (hidden**2 + model.heads.kv_heads * model.heads.head_dim**2)
        copies = 2 if rotation.resolved_hessians == "dense" else 1
        parts += copies * layers * of_a_layer
        if run.bases.place == "residual":  # the other place is added after the last layer
            parts += boundaries * run.dtype.itemsize
    if len(run.tokens):
        pruning = run.recipe.pruning
        parts += sum(
            map_bytes(tuple(linear.weight.shape), rotated=run.rotates)
            for linear in linears
            if pruning.sparsity_for(linear.full_name).ratio > 0
        )
    done = sum(file.stat().st_size for file in partial.glob("*.safetensors"))
    return checkpoint, max(0, parts - done)
