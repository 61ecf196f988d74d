"""Whether a recipe, a model and its calibration tokens fit each other: checked once, before any work."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.architectures import architecture_of, decoder_layers, head_shape, layer_linears, module_at
from drot.config import Recipe, RotationConfig
from drot.errors import UserError
from drot.sparse.quantization_config import QUANT_METHOD, quantization_config_of


def check_recipe(
    config: Any, recipe: Recipe, devices: list[torch.device], *, rotations_given: bool = False
) -> None:
    """Recipe against a model's `config`, which is read before its weights are.

    rotations_given: they come from a file, so nothing is trained.

    Raises UserError for: an architecture that drot does not know; a model that is quantised, packed or
    rotated; n:m or blocks that do not divide the model's dimensions; several devices for a recipe that
    trains one layer after the other; a rotation of the residual between layers of the same basis, or
    before the next layer's rotation is known.
    """
    architecture_of(config)
    if quantised := quantization_config_of(config):
        method = quantised.get("quant_method")
        if method == QUANT_METHOD and quantised.get("packed"):
            raise UserError("this model is packed, so it was pruned already: prune its dense original")
        if method == QUANT_METHOD:
            raise UserError("this model was already rotated by drot: prune its dense original")
        raise UserError(f"this model is quantised ({method}): prune its unquantised original")
    rotation, sparsity = recipe.rotation, recipe.pruning.sparsity
    if len(devices) > 1 and (rotation.mode, rotation.hessians) != ("layer", "dense"):
        raise UserError(
            'several devices train layers side by side, which needs `mode="layer"` and `hessians="dense"`; '
            f'got `mode="{rotation.mode}"` and `hessians="{rotation.hessians}"`'
        )
    if rotation.boundary == "residual":
        _check_residual_boundary(rotation, rotations_given)
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
            f"`blocks` must add up to the hidden size {hidden}, got {list(rotation.blocks)} = "
            f"{sum(rotation.blocks)}"
        )
    if isinstance(rotation.blocks, int) and hidden % rotation.blocks:
        raise UserError(f"`blocks` must divide the hidden size {hidden}; got {rotation.blocks}")


def _check_residual_boundary(rotation: RotationConfig, rotations_given: bool) -> None:
    if rotation.mode != "layer":
        why = "all layers share one basis" if rotation.mode == "shared" else "nothing is rotated"
        raise UserError(
            f'`boundary="residual"` changes nothing with `mode="{rotation.mode}"`, where {why}: leave it out'
        )
    if rotation.hessians != "dense" and not rotations_given:
        raise UserError(
            '`boundary="residual"` needs the rotation of the next layer before a layer is pruned: add '
            f'`hessians="dense"`, or `rotations` from a file; got `hessians="{rotation.hessians}"`'
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


def check_architecture(model: PreTrainedModel) -> None:
    """Raises UserError, which names the first module of the model that differs from its entry in the table
    of architectures: in its path, type or shape."""
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
                raise UserError(f"layer {index}: {path} has a bias; only RMSNorm can be folded")
        for role, linear in layer_linears(layer, arch).items():
            if tuple(linear.weight.shape) != expected[role]:
                raise UserError(
                    f"layer {index}: {role} must be {list(expected[role])} by the model's config, "
                    f"got {list(linear.weight.shape)}"
                )
