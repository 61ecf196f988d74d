"""The variants that `drot bench` compares: the same layer or model dense, 2:4, and 2:4 with its rotations.

The dense one is computed by transformers' own code, the others as `drot.load` returns them.

Variants share the parameters in which they do not differ, so that all fit into memory at the same time.
"""

import copy
import math
from collections.abc import Collection
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from drot.checkpoint.quantization_config import DrotConfig, drot_config_of
from drot.config import Recipe, resolve
from drot.core.errors import UserError
from drot.model.boundary import (
    RotatedLayer,
    down_rotations,
    remove_boundary_rotation,
    remove_down_rotation,
    rotation_place,
)
from drot.model.decoder import DecoderModel
from drot.model.families import down_widths, family_of
from drot.ops import nm_mask
from drot.sparse.fused import fuse, unfuse_rotation
from drot.sparse.linear import is_packed
from drot.sparse.packed import pack_model, unpack_model

DENSE, SPARSE, ROTATED = "dense", "2:4", "2:4 + rotation"

_DIMENSIONS = (
    *("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("num_hidden_layers", "vocab_size"),
)
#: name → configuration of a published model, for measurements with random weights
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_DIMENSIONS, values, strict=True), head_dim=128, tie_word_embeddings=False)
    for name, *values in (
        ("llama-2-7b", "llama", 4096, 11008, 32, 32, 32, 32000),
        ("llama-3-8b", "llama", 4096, 14336, 32, 8, 32, 128256),
        ("llama-3-70b", "llama", 8192, 28672, 64, 8, 80, 128256),
        ("llama-3-405b", "llama", 16384, 53248, 128, 8, 126, 128256),
        ("qwen2.5-7b", "qwen2", 3584, 18944, 28, 4, 28, 152064),
        ("qwen3-8b", "qwen3", 4096, 12288, 32, 8, 36, 151936),
    )
}


def shape_config(name: str) -> Any:
    """The configuration of the model `name` in SHAPES. Raises UserError for another name."""
    if name not in SHAPES:
        raise UserError(f"`shape` must be one of {', '.join(SHAPES)}; got {name!r}")
    return AutoConfig.for_model(**SHAPES[name])


@torch.no_grad()
def layer_variants(config: Any, *, dtype: torch.dtype, device: torch.device) -> dict[str, PreTrainedModel]:
    """Variant → model of one decoder layer in the dimensions of `config`, with random weights.

    The vocabulary has 8 tokens, so that hardly anything but the layer takes memory. The rotations are those
    of the checkpoint of `config`. If it names none, they are those that `drot prune --format packed` writes
    by default.
    """
    config = copy.deepcopy(config)
    held = drot_config_of(config)
    if held is None or not (held.boundary or held.down_rotation):
        width, stream = math.gcd(*down_widths(config)), family_of(config).rotates_stream
        rotation = resolve(Recipe(), format="packed", down_width=width, rotates_stream=stream).rotation
        held = DrotConfig(boundary=rotation.boundary, down_rotation=rotation.down_block)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    small = {"vocab_size": 8, "output_vocab_size": None, "pad_token_id": None}
    config.update({"num_hidden_layers": 1} | small)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    dense = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval().requires_grad_(False)
    (layer,) = DecoderModel(dense).layers
    for linear in layer.linears.values():
        linear.weight.masked_fill_(nm_mask(linear.weight.abs(), 2, 4), 0)
    sparse = _sharing_copy(dense)
    pack_model(sparse)
    fuse(sparse)
    rotated = _sharing_copy(sparse)
    (layer,) = DecoderModel(rotated).layers
    # random matrices take the time of orthogonal ones, which are slow to make
    if held.boundary is not None:
        layer.expect_boundary(held.boundary).weight.normal_(0, config.hidden_size**-0.5)
    if (size := held.down_rotation) is not None:
        for part in layer.expect_down_rotation(size):
            part.weight.normal_(0, size**-0.5)
    fuse(rotated)
    return {DENSE: dense, SPARSE: sparse, ROTATED: rotated}


def model_variants(model: PreTrainedModel, dense_linears: Collection[str] = ()) -> dict[str, PreTrainedModel]:
    """Variant → model, from a 2:4 `model`, dense or packed. `dense_linears` names linears that are not 2:4.

    DENSE has dense weights and no rotations, like the model before it was pruned. SPARSE is packed and has
    no rotations. ROTATED is packed with the rotations; it is left out if `model` has none. A variant without
    the rotations does not compute what `model` does, but takes the time of a model that does.

    Raises UserError that names the layer, the linear and the row of a weight that is not 2:4.
    """
    packed = _sharing_copy(model)
    if not is_packed(packed):
        pack_model(packed, dense_linears)
    fuse(packed)
    plain = _sharing_copy(packed)
    for handle in DecoderModel(plain).layers:
        unfuse_rotation(handle)
    layers = [layer for layer in DecoderModel(plain).layer_modules if isinstance(layer, RotatedLayer)]
    for layer in layers:
        if down_rotations(layer):
            remove_down_rotation(layer)
        if rotation_place(layer) is not None:
            remove_boundary_rotation(layer)
    fuse(plain)  # an MLP lost its op with R3
    dense = _sharing_copy(plain)
    unpack_model(dense)
    return {DENSE: dense, SPARSE: plain} | ({ROTATED: packed} if layers else {})


def _sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules of `model`, with the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
