"""What a speed measurement compares: the same layer or model dense, 2:4, and 2:4 with its rotations.

All variants share the parameters that do not differ, so that they fit beside each other.
"""

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from drot.architectures import architecture_of, decoder_layers, layer_linears, module_at
from drot.errors import UserError
from drot.ops import nm_mask
from drot.sparse.fused import fuse, unfuse_rotations
from drot.sparse.linear import is_packed
from drot.sparse.packed import pack_model, unpack_model
from drot.sparse.quantization_config import boundary_of
from drot.surgery.residual import add_residual_rotation, remove_residual_rotation, rotation_place

DENSE, SPARSE, ROTATED = "dense", "2:4", "2:4 + rotation"

_LLAMA = dict(model_type="llama", head_dim=128, tie_word_embeddings=False)
#: dimensions of models that people run, for random weights
SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _LLAMA
    | dict(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32)
    | dict(num_hidden_layers=32, vocab_size=32000),
    "llama-3-8b": _LLAMA
    | dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    | dict(num_hidden_layers=32, vocab_size=128256),
    "llama-3-70b": _LLAMA
    | dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
    | dict(num_hidden_layers=80, vocab_size=128256),
    "qwen2.5-7b": dict(model_type="qwen2", tie_word_embeddings=False)
    | dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4)
    | dict(num_hidden_layers=28, vocab_size=152064),
    "qwen3-8b": dict(model_type="qwen3", head_dim=128, tie_word_embeddings=False)
    | dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8)
    | dict(num_hidden_layers=36, vocab_size=151936),
}


def shape_config(name: str) -> Any:
    """The configuration of one of SHAPES. Raises UserError for another name."""
    if name not in SHAPES:
        raise UserError(f"`shape` must be one of {', '.join(SHAPES)}; got {name!r}")
    return AutoConfig.for_model(**SHAPES[name])


@torch.no_grad()
def layer_variants(config: Any, *, dtype: torch.dtype, device: torch.device) -> dict[str, PreTrainedModel]:
    """Models of one decoder layer in `config`'s dimensions, with random weights and next to no vocabulary.
    The rotation is where `config`'s checkpoint has it: beside the MLP, or in front of the layer."""
    config = copy.deepcopy(config)
    place = boundary_of(config) or "input"
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 8, None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    dense = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval().requires_grad_(False)
    arch = architecture_of(config)
    (layer,) = decoder_layers(dense, arch)
    for linear in layer_linears(layer, arch).values():
        linear.weight.masked_fill_(nm_mask(linear.weight.abs(), 2, 4), 0)
    sparse = _sharing_copy(dense)
    pack_model(sparse)
    fuse(sparse)
    rotated = _sharing_copy(sparse)
    (layer,) = decoder_layers(rotated, arch)
    d = config.hidden_size
    rotation = add_residual_rotation(layer, arch, place, d, dtype=dtype, device=device)
    rotation.weight.normal_(0, d**-0.5)  # as large as an orthogonal one, which takes no other time
    fuse(rotated)
    return {DENSE: dense, SPARSE: sparse, ROTATED: rotated}


@torch.no_grad()
def stacked_variants(layers: dict[str, PreTrainedModel], config: Any) -> dict[str, PreTrainedModel]:
    """Whole models in `config`'s dimensions. Every decoder layer of each is the one that `layer_variants`
    made, weights and all, so that any of SHAPES takes the memory of a layer; only the first goes without
    its rotation. Where a layer is larger than the caches, a model of separate layers takes the same time.
    """
    rows, d = config.vocab_size, config.hidden_size
    like = next(layers[DENSE].parameters())
    block = torch.randn(min(rows, 4096), d, dtype=like.dtype, device=like.device)
    embedding, head = (
        torch.nn.Parameter(block.roll(shift, 1).repeat(-(-rows // len(block)), 1)[:rows], False)
        for shift in (0, 1)
    )
    models = {}
    for name, model in layers.items():
        models[name] = whole = _sharing_copy(model)
        arch = architecture_of(config)
        whole.config.num_hidden_layers, whole.config.vocab_size = config.num_hidden_layers, rows
        if getattr(whole.config, "layer_types", None):
            whole.config.layer_types = whole.config.layer_types * config.num_hidden_layers
        module_at(whole, arch.embedding).weight = embedding
        module_at(whole, arch.lm_head).weight = head
        stack = decoder_layers(whole, arch)
        for index in range(1, config.num_hidden_layers):
            layer, attention = _twin(stack[0]), _twin(module_at(stack[0], arch.attention))
            attention.layer_idx = index  # its place in the KV cache
            setattr(layer, arch.attention, attention)
            stack.append(layer)
        if rotation_place(stack[0]) is not None:
            stack[0] = _twin(stack[0])
            remove_residual_rotation(stack[0])
    return models


def _twin(module: Any) -> Any:
    """Another module with the same children and parameters."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin


def model_variants(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """A 2:4 model, packed or with its zeros written out: dense and without rotations, as its original
    was; packed, without and (where it has some) with its rotations. Only the last computes what the
    checkpoint does; the others are as fast as models that do.

    Raises UserError, naming layer, linear and row, where a weight is not 2:4.
    """
    packed = _sharing_copy(model)
    if not is_packed(packed):
        pack_model(packed)
    fuse(packed)
    plain = _sharing_copy(packed)
    unfuse_rotations(plain)
    layers = [
        layer
        for layer in decoder_layers(plain, architecture_of(plain.config))
        if rotation_place(layer) is not None
    ]
    for layer in layers:
        remove_residual_rotation(layer)
    dense = _sharing_copy(plain)
    unpack_model(dense)
    return {DENSE: dense, SPARSE: plain} | ({ROTATED: packed} if layers else {})


def _sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Modules of its own, the parameters of the model."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
