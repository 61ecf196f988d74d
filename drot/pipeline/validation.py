"""Checks that a recipe, a model and calibration tokens fit each other, before the run starts."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.quantization_config import QUANT_METHOD, quantization_config_of
from drot.config import PruningConfig, Recipe, RotationConfig, matches
from drot.core.errors import UserError
from drot.model.families import (
    architecture_of,
    decoder_layers,
    head_shape,
    layer_linears,
    module_at,
    positions_of,
)
from drot.sparse.packed import dense_linears


def check_recipe(
    config: Any,
    recipe: Recipe,
    devices: list[torch.device],
    *,
    rotations_given: bool = False,
    format: str = "dense",
) -> None:
    """Checks a recipe against a model's `config`, which is available before the weights are loaded.

    Raises UserError for

    - an unsupported architecture,
    - a model that is already quantised, packed or rotated,
    - n:m or blocks that do not divide the model's dimensions,
    - the packed format if no linear is 2:4,
    - patterns of `keep` and `sparsity_of` that match no linear,
    - several devices with a recipe whose layers cannot be trained in parallel,
    - rotations of the residual if all layers have the same R1, or if the R1 of the next layer is not known
      when a layer is pruned.

    Args:
        config: the config of the model.
        recipe: the settings of the run.
        devices: the devices of the run.
        rotations_given: whether the rotations are loaded from a file instead of trained.
        format: format of the weights in the result.
    """
    architecture_of(config)
    if quantised := quantization_config_of(config):
        method = quantised.get("quant_method")
        if method == QUANT_METHOD and quantised.get("packed"):
            raise UserError("this model is packed, so it was pruned already: prune its dense original")
        if method == QUANT_METHOD:
            raise UserError("this model was already rotated by drot: prune its dense original")
        raise UserError(f"this model is quantised ({method}): prune its unquantised original")
    rotation, hidden = recipe.rotation, config.hidden_size
    if len(devices) > 1 and (rotation.mode, rotation.resolved_hessians) != ("layer", "dense"):
        raise UserError(
            'several devices train layers in parallel, which needs `mode="layer"` and `hessians="dense"`; '
            f'got `mode="{rotation.mode}"` and `hessians="{rotation.resolved_hessians}"`'
        )
    if rotation.boundary == "residual":
        _check_residual_boundary(rotation, rotations_given)
    _check_patterns(config, recipe.pruning)
    if format == "packed":
        dense_linears(config, recipe.pruning)
    if isinstance(rotation.blocks, tuple) and sum(rotation.blocks) != hidden:
        raise UserError(
            f"`blocks` must add up to the hidden size {hidden}; got {list(rotation.blocks)} with the sum "
            f"{sum(rotation.blocks)}"
        )
    if isinstance(rotation.blocks, int) and hidden % rotation.blocks:
        raise UserError(f"`blocks` must divide the hidden size {hidden}; got {rotation.blocks}")


def _check_patterns(config: Any, pruning: PruningConfig) -> None:
    """Raises UserError for a pattern that matches no linear, and for n:m that does not divide its inputs."""
    arch, shape = architecture_of(config), head_shape(config)
    names = [arch.linear_names(index) for index in range(config.num_hidden_layers)]
    for field, patterns in (
        ("keep", pruning.keep),
        ("sparsity_of", [pair[0] for pair in pruning.sparsity_of]),
    ):
        for pattern in patterns:
            if not any(matches(pattern, name) for layer in names for name in layer.values()):
                raise UserError(
                    f"the pattern {pattern!r} of `{field}` matches no linear of this model, which has "
                    f"{len(names)} layers: {names[0]['q_proj']} is the name of a linear, which layers.0.* "
                    "and q_proj match"
                )
    sizes = {
        "o_proj": ("input of o_proj (heads * head_dim)", shape.heads * shape.head_dim),
        "down_proj": ("intermediate size", config.intermediate_size),
    }
    for layer in names:
        for role, name in layer.items():
            sparsity = pruning.sparsity_for(name)
            what, size = sizes.get(role, ("hidden size", config.hidden_size))
            if sparsity.structured and size % sparsity.m:
                raise UserError(
                    f"{sparsity} of {name} needs dimensions that are multiples of {sparsity.m}; this model's "
                    f"{what} is {size}: choose another n:m or a ratio as `sparsity` or `sparsity_of`"
                )


def _check_residual_boundary(rotation: RotationConfig, rotations_given: bool) -> None:
    if rotation.mode != "layer":
        why = "all layers have the same R1" if rotation.mode == "shared" else "nothing is rotated"
        raise UserError(
            f'`boundary="residual"` has no effect with `mode="{rotation.mode}"`, where {why}: '
            "leave out `boundary`"
        )
    if rotation.resolved_hessians != "dense" and not rotations_given:
        raise UserError(
            '`boundary="residual"` needs the rotation of the next layer before a layer is pruned; got '
            f'`hessians="{rotation.resolved_hessians}"`: use `hessians="dense"`, or name a file of '
            "`rotations`"
        )


def check_tokens(tokens: Tensor, config: Any) -> None:
    """Raises UserError for token ids outside of the model's vocabulary and for too long sequences."""
    if not len(tokens):
        return  # a run that needs no calibration
    if int(tokens.max()) >= config.vocab_size or int(tokens.min()) < 0:
        raise UserError(
            f"calibration token ids must be in [0, {config.vocab_size}), the model's vocabulary, "
            f"got {int(tokens.min())} to {int(tokens.max())}: use the model's tokenizer"
        )
    check_seqlen(tokens.shape[1], config)


def check_seqlen(seqlen: int, config: Any) -> None:
    """Raises UserError for sequences that are longer than a model of `config` reads."""
    positions = positions_of(config)
    if positions and seqlen > positions:
        raise UserError(f"`seqlen` must be at most {positions}, the positions of this model; got {seqlen}")


def check_architecture(model: PreTrainedModel) -> None:
    """Raises UserError for a module that does not agree with ARCHITECTURES and the model's config."""
    config, arch = model.config, architecture_of(model.config)
    shape, d = head_shape(config), config.hidden_size
    for path in (arch.embedding, arch.final_norm, arch.lm_head):
        module_at(model, path)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ff = config.intermediate_size
    expected = {
        "q_proj": (q, d),
        "k_proj": (kv, d),
        "v_proj": (kv, d),
        "o_proj": (d, q),
        "gate_proj": (ff, d),
        "up_proj": (ff, d),
        "down_proj": (d, ff),
    }
    for index, layer in enumerate(decoder_layers(model, arch)):
        for path in (arch.attention_norm, arch.mlp_norm):
            if getattr(module_at(layer, path), "bias", None) is not None:
                raise UserError(f"layer {index}: {path} must be an RMSNorm, got a norm with a bias")
        for role, linear in layer_linears(layer, arch).items():
            if tuple(linear.weight.shape) != expected[role]:
                raise UserError(
                    f"layer {index}: {role} must be {list(expected[role])} by the model's config, "
                    f"got {list(linear.weight.shape)}"
                )
