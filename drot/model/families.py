"""The supported model families, each a declaration of where its weights lie and how rotations act on them.

Nothing outside of drot/model knows the name of a module. A new family is a new entry of FAMILIES, or of
MIXTURES (mixtures.py), and a small model in tests/small_models.py, on which the tests check that rotations
leave the outputs unchanged.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from drot.core.errors import UserError
from drot.model.attentions import hybrid
from drot.model.family import Family, InputGroup, LinearSpec
from drot.model.llama import LLAMA
from drot.model.mixtures import MIXTURES
from drot.model.sizes import Width, absent_widths, experts_of, layer_kind, widths_of


def _inside(family: Family) -> Family:
    """The family whose stream nothing rotates: R1 acts on the inputs of attention and MLP alone."""

    def unrotated(linear: LinearSpec) -> LinearSpec:
        return replace(linear, output=None) if linear.output == "r1" else linear

    groups = (replace(group, linears=tuple(map(unrotated, group.linears))) for group in family.groups)
    return replace(family, groups=tuple(groups))


def _with_norms(family: Family, attention: str | None, mlp: str | None) -> Family:
    """The family with other norms in front of its attention and its MLP."""
    norms = {"attention": attention, "mlp": mlp}
    groups = (replace(group, norm=norms.get(group.name)) for group in family.groups)
    return replace(family, groups=tuple(groups))


#: Norms behind attention and MLP, and none in front of them. The weight of such a norm acts between a block
#: and the stream, where no rotation passes it.
POST_NORM = replace(
    _with_norms(_inside(LLAMA), None, None),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
#: Norms on both sides of attention and MLP.
SANDWICH = replace(
    _with_norms(_inside(LLAMA), "input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    logits_cap="final_logit_softcapping",
)
#: LayerNorms with a shift, an MLP without gate that is no module of its own, learned positions, and heads
#: that share no keys. Its activation fixes the order of fc2's inputs but for permutations.
OPT = Family(
    models="OPT",
    layer_norm=True,
    attention="self_attn",
    mlp_front=("fc1", "activation_fn"),
    mlp="fc2",
    residual_dropout="dropout",
    layers="model.decoder.layers",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    required=(
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
        ("enable_bias", True),
    ),
    groups=(
        InputGroup(
            name="attention",
            norm="self_attn_layer_norm",
            linears=(
                LinearSpec("self_attn.q_proj", ("query", "hidden"), input="r1"),
                LinearSpec("self_attn.k_proj", ("kv", "hidden"), input="r1"),
                LinearSpec("self_attn.v_proj", ("kv", "hidden"), input="r1", output="r2"),
            ),
        ),
        InputGroup(
            name="o",
            linears=(LinearSpec("self_attn.out_proj", ("hidden", "query"), input="r2", output="r1"),),
        ),
        InputGroup(
            name="mlp",
            norm="final_layer_norm",
            linears=(LinearSpec("fc1", ("mlp", "hidden"), input="r1"),),
        ),
        InputGroup(name="down", linears=(LinearSpec("fc2", ("hidden", "mlp"), output="r1"),)),
    ),
)


#: `model_type` of a config.json → family
FAMILIES = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, models="Mistral"),
    "ministral3": replace(LLAMA, models="Ministral 3"),
    "qwen2": replace(LLAMA, models="Qwen2, Qwen2.5"),
    "qwen3": replace(LLAMA, models="Qwen3"),
    "smollm3": replace(LLAMA, models="SmolLM3"),
    "seed_oss": replace(LLAMA, models="Seed-OSS", mlp_dropout="residual_dropout"),
    # its multipliers of the embedding, of the attention's scores and of the logits commute with rotations
    "granite": replace(
        LLAMA, models="Granite 3", residual_multiplier="residual_multiplier", logits_divisor="logits_scaling"
    ),
    "phi3": replace(
        LLAMA.with_fused("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")).with_fused(
            "mlp.gate_up_proj", ("gate_proj", "up_proj")
        ),
        models="Phi-3, Phi-3.5, Phi-4",
        activation="activation_fn",
        residual_dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
    ),
    "glm4": replace(
        _inside(LLAMA).with_fused("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        models="GLM-4",
        activation="activation_fn",
        post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "olmo2": replace(POST_NORM, models="OLMo 2"),
    "olmo3": replace(POST_NORM, models="OLMo 3"),
    "exaone4": replace(POST_NORM, models="EXAONE 4"),
    "gemma2": replace(SANDWICH, models="Gemma 2"),
    "gemma3_text": replace(SANDWICH, models="Gemma 3"),
    "cohere2": replace(
        _with_norms(LLAMA, "input_layernorm", "input_layernorm"),
        models="Command R7B, Command A",
        layer_norm=True,
        parallel=True,
        logits_multiplier="logit_scale",
    ),
    "opt": OPT,
    "qwen3_5_text": replace(
        hybrid(LLAMA, {"in_proj_qkv": "linear_qkv", "in_proj_z": "linear_value"}, ("in_proj_b", "in_proj_a")),
        models="Qwen3.5",
        needs="PrefixChange",
    ),
    **MIXTURES,
}


def family_of(config: Any) -> Family:
    """The family of a model with `config`, with the linears of this model and the groups of each expert.

    Raises UserError for a model type that is not in FAMILIES, for a config that its entry excludes, and for a
    transformers that is too old for it.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise UserError(
            f"model type {model_type!r} is not supported: expected one of {', '.join(FAMILIES)}; "
            "drot info MODEL names what drot cannot place in it"
        )
    family = FAMILIES[model_type]
    if family.needs and not hasattr(import_module("transformers.core_model_loading"), family.needs):
        raise UserError(
            f"a model of type {model_type!r} needs a newer transformers: pip install -U transformers"
        )
    for name, value in family.required:
        if (got := getattr(config, name, value)) != value:
            raise UserError(
                f"a model of type {model_type!r} must have {name}={value} in its config, got {got}"
            )
    return _fitted(family, experts_of(config), absent_widths(config))


def layer_families(config: Any, layers: int) -> list[Family]:
    """The declaration of each of `layers` decoder layers of a model with `config`.

    Raises UserError as `family_of`.
    """
    family = family_of(config)
    kinds = dict(family.kinds)
    of_layers = (layer_kind(config, index) for index in range(layers))
    count, absent = experts_of(config), absent_widths(config)
    return [_fitted(kinds[kind], count, absent) if kind in kinds else family for kind in of_layers]


def linear_names(config: Any) -> Iterator[tuple[str, LinearSpec]]:
    """The full name and the declaration of each linear of a model with `config`."""
    for index, family in enumerate(layer_families(config, config.num_hidden_layers)):
        for linear in family.linears:
            yield family.full_name(index, linear), linear


def down_widths(config: Any) -> list[int]:
    """The numbers of inputs of the linears that R3 rotates in a model with `config`, each number once."""
    widths = widths_of(config)
    specs = (spec for _, spec in linear_names(config) if spec.input == "r3")
    return list(dict.fromkeys(widths[spec.shape[1]] for spec in specs))


@functools.cache
def _fitted(family: Family, experts: int, absent: frozenset[Width]) -> Family:
    family = family.without(absent)
    return family if family.experts is None else family.with_experts(experts)
