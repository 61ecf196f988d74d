"""Whether a recipe, a model and its calibration tokens fit each other: asked before any work is done."""

from typing import Any

import torch
from torch import Tensor

from drot.architectures import architecture_of, head_shape, quantization_of
from drot.config import Recipe, RotationConfig
from drot.errors import UserError


def check_recipe(
    config: Any, recipe: Recipe, devices: list[torch.device], *, rotations_given: bool = False
) -> None:
    """Recipe against a model's `config`, which is read before its weights are.

    rotations_given: they come from a file, so nothing is trained.

    Raises UserError: an architecture that drot does not know, a model that is quantised, or was packed or
    rotated by drot already, n:m or blocks that do not divide the model's dimensions, several devices for
    a recipe that trains one layer after the other, down_proj in a next basis that is not there or not
    known in time.
    """
    architecture_of(config)
    if quantised := quantization_of(config):
        method = quantised.get("quant_method")
        if method == "drot" and quantised.get("packed"):
            raise UserError("this model is packed, so it was pruned already: prune its dense original")
        if method == "drot":
            raise UserError("this model was already rotated by drot: prune its dense original")
        raise UserError(f"this model is quantised ({method}): prune its unquantised original")
    rotation, sparsity = recipe.rotation, recipe.pruning.sparsity
    if len(devices) > 1 and (rotation.mode, rotation.hessians) != ("layer", "dense"):
        raise UserError(
            "several devices train layers side by side, which needs --rotation layer --hessians dense; "
            f"got --rotation {rotation.mode} --hessians {rotation.hessians}"
        )
    if rotation.down_basis == "next":
        _check_next_basis(rotation, rotations_given)
    shape, hidden = head_shape(config), config.hidden_size
    sizes = {
        "hidden size": hidden,
        "input of o_proj (heads * head_dim)": shape.heads * shape.head_dim,
        "intermediate size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if sparsity.structured and size % sparsity.m:
            raise UserError(
                f"sparsity {sparsity} needs dimensions that are multiples of {sparsity.m}; this model's "
                f"{name} is {size}: choose another n:m, or a ratio"
            )
    if isinstance(rotation.blocks, tuple) and sum(rotation.blocks) != hidden:
        raise UserError(
            f"blocks must add up to the hidden size {hidden}, got {list(rotation.blocks)} = "
            f"{sum(rotation.blocks)}"
        )
    if isinstance(rotation.blocks, int) and hidden % rotation.blocks:
        raise UserError(
            f"--rotation block:N needs an N that divides the hidden size {hidden}; got {rotation.blocks}"
        )


def _check_next_basis(rotation: RotationConfig, rotations_given: bool) -> None:
    if rotation.mode != "layer":
        why = "all layers share one basis" if rotation.mode == "shared" else "nothing is rotated"
        raise UserError(
            f"--down-basis next changes nothing with --rotation {rotation.mode}, where {why}: leave it out"
        )
    if rotation.hessians != "dense" and not rotations_given:
        raise UserError(
            "--down-basis next needs the next layer's rotation before a layer is pruned: "
            "--hessians dense, or --rotations FILE; got --hessians " + rotation.hessians
        )


def check_tokens(tokens: Tensor, config: Any) -> None:
    """Raises UserError for tokens that are not of this model's vocabulary, or longer than it reads."""
    if int(tokens.max()) >= config.vocab_size or int(tokens.min()) < 0:
        raise UserError(
            f"calibration token ids must be in [0, {config.vocab_size}), the model's vocabulary, "
            f"got {int(tokens.min())} to {int(tokens.max())}: use this model's own tokenizer"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest and tokens.shape[1] > longest:
        raise UserError(f"seqlen {tokens.shape[1]} is more than the {longest} positions of this model")
