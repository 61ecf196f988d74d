"""Schemas of config.json and of the index of the weights."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from drot.core.reading import Entries

#: largest number of decoder layers: tens of times that of any published model
MOST_LAYERS = 10_000

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _stays_inside(name: str) -> str:
    if not re.fullmatch(r"[^/\\\0]+", name) or name in (".", ".."):
        raise ValueError("must be the name of a file in the same folder, without / and \\")
    return name


class WeightIndex(Entries):
    """model.safetensors.index.json: tensor → the file that holds it."""

    metadata: dict[str, Any]
    weight_map: Annotated[dict[str, Annotated[str, AfterValidator(_stays_inside)]], Field(min_length=1)]


class _Rope(Entries):
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    factor: Annotated[float, Field(gt=0)] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    rope_type: str | None = None


def _least(value: Any) -> Any:
    """The least number of a list of numbers; another value as it is."""
    numbers = isinstance(value, list) and value and all(type(one) is int for one in value)
    return min(value) if numbers else value


class ModelConfig(Entries):
    """config.json of a model: the entries from which sizes and kinds of modules follow.

    Only the check reads the defaults: another family may lack the entries or have other names for them.
    """

    model_type: str
    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 1
    hidden_size: Positive = 1
    intermediate_size: Annotated[Positive, BeforeValidator(_least)] = 1  # Gemma 3n has a list
    vocab_size: Positive = 1
    num_attention_heads: Positive = 1
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    max_position_embeddings: Annotated[int, Field(ge=1)] | None = None
    rms_norm_eps: Annotated[float, Field(ge=0, lt=1)] | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    sliding_window: Annotated[int, Field(ge=0)] | None = None
    layer_types: list[str] | None = None
    tie_word_embeddings: bool | None = None
    quantization_config: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None


class RopeOfModel(Entries):
    """`rope_parameters` and `rope_scaling` of the families that drot prunes."""

    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
