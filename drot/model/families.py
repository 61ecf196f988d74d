"""The supported model families, each a declaration of where its weights lie and how rotations act on them.

Nothing outside of drot/model knows the name of a module. A new family is a new entry of FAMILIES, or of
MIXTURES (mixtures.py), and a small model in tests/small_families.py, on which the tests check that rotations
leave the outputs unchanged.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from drot.core.errors import UserError
from drot.model.attentions import hybrid, latent
from drot.model.convolutions import LFM2_ATTENTION, LFM3_ATTENTION, with_short_convolutions
from drot.model.dense import (
    COHERE,
    GEMMA4,
    GRANITE,
    LLAMA,
    OPT,
    POST_NORM,
    SANDWICH,
    inside,
    with_norms,
    without_gate,
)
from drot.model.family import Family, LinearSpec
from drot.model.mixtures import MIXTURES
from drot.model.sizes import Width, absent_widths, check_lending, experts_of, layer_kind, widths_of

APERTUS = replace(
    with_norms(without_gate(LLAMA), "attention_layernorm", "feedforward_layernorm"),
    models="Apertus",
    untouched=(*LLAMA.untouched, "mlp.act_fn"),
)

#: `model_type` of a config.json → family
FAMILIES = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, models="Mistral"),
    "ministral": replace(LLAMA, models="Ministral 8B"),
    "ministral3": replace(LLAMA, models="Ministral 3"),
    "qwen2": replace(LLAMA, models="Qwen2, Qwen2.5"),
    "qwen3": replace(LLAMA, models="Qwen3"),
    "smollm3": replace(LLAMA, models="SmolLM3"),
    "ernie4_5": replace(LLAMA, models="ERNIE 4.5"),
    "hunyuan_v1_dense": replace(
        LLAMA, models="Hunyuan", untouched=("self_attn.query_layernorm", "self_attn.key_layernorm")
    ),
    "cwm": replace(LLAMA, models="Code World Model"),
    "helium": replace(LLAMA, models="Helium 1"),
    "internlm3": replace(LLAMA, models="InternLM3"),
    "iquestcoder": replace(LLAMA, models="IQuest-Coder"),
    # its multiplier of the embedding commutes with rotations
    "gemma": replace(LLAMA, models="Gemma 1", norm_offset=1.0, tied_elsewhere=True),
    "seed_oss": replace(LLAMA, models="Seed-OSS", mlp_dropout="residual_dropout"),
    "granite": replace(GRANITE, models="Granite 3"),
    "granite_swa": replace(GRANITE, models="Granite Swash"),
    "hyperclovax": replace(
        inside(LLAMA),
        models="HyperCLOVA X SEED Think",
        post_norms=("post_norm1", "post_norm2"),
        residual_multiplier="residual_multiplier",
        logits_multiplier="logits_scaling",
        required=(("use_post_norm", True),),
    ),
    "phi3": replace(
        LLAMA.with_fused("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")).with_fused(
            "mlp.gate_up_proj", ("gate_proj", "up_proj")
        ),
        models="Phi-3, Phi-3.5, Phi-4",
        activation="activation_fn",
        residual_dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
    ),
    "glm": replace(
        LLAMA.with_fused("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        models="GLM-4-9B, GLM-Edge",
        activation="activation_fn",
    ),
    "glm4": replace(
        inside(LLAMA).with_fused("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        models="GLM-4",
        activation="activation_fn",
        post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "olmo2": replace(POST_NORM, models="OLMo 2"),
    "olmo3": replace(POST_NORM, models="OLMo 3"),
    "exaone": replace(
        LLAMA,
        models="EXAONE 3.0, EXAONE 3.5",
        body=(
            ("model.embed_tokens", "transformer.wte"),
            ("model.layers", "transformer.h"),
            ("model.norm", "transformer.ln_f"),
            ("model", "transformer"),
        ),
        files=(
            ("self_attn.o_proj.", "attn.attention.out_proj."),
            ("self_attn.", "attn.attention."),
            ("input_layernorm.", "ln_1."),
            ("post_attention_layernorm.", "ln_2."),
            ("mlp.gate_proj.", "mlp.c_fc_0."),
            ("mlp.up_proj.", "mlp.c_fc_1."),
            ("mlp.down_proj.", "mlp.c_proj."),
        ),
    ),
    "exaone4": replace(POST_NORM, models="EXAONE 4"),
    "gemma2": replace(SANDWICH, models="Gemma 2", norm_offset=1.0),
    "vaultgemma": replace(
        with_norms(LLAMA, "input_layernorm", "pre_feedforward_layernorm"),
        models="VaultGemma",
        norm_offset=1.0,
        logits_cap="final_logit_softcapping",
    ),
    "gemma3_text": replace(SANDWICH, models="Gemma 3", norm_offset=1.0),
    "gemma4_unified_text": replace(GEMMA4, models="Gemma 4 12B"),
    "cohere": replace(COHERE, models="Command R, Command R+, Aya Expanse"),
    "cohere2": replace(COHERE, models="Command R7B, Command A"),
    "opt": OPT,
    "starcoder2": replace(
        without_gate(LLAMA, "mlp.c_fc", "mlp.c_proj"),
        models="StarCoder2",
        layer_norm=True,
        required=(("use_bias", True),),
    ),
    "jais2": replace(
        without_gate(LLAMA),
        models="Jais 2",
        layer_norm=True,
        required=(("attention_bias", True), ("mlp_bias", True)),
    ),
    "arcee": replace(without_gate(LLAMA), models="AFM-4.5B"),
    "apertus": APERTUS,
    "apertus1p5_text": replace(APERTUS, models="Apertus 1.5"),
    "qwen3_5_text": replace(
        hybrid(LLAMA, {"in_proj_qkv": "linear_qkv", "in_proj_z": "linear_value"}, ("in_proj_b", "in_proj_a")),
        models="Qwen3.5",
        needs="PrefixChange",
    ),
    "lfm2": with_short_convolutions(LFM2_ATTENTION),
    "lfm3": with_short_convolutions(LFM3_ATTENTION),
    "youtu": replace(latent(LLAMA), models="Youtu-LLM"),
    "minicpm3": replace(
        latent(LLAMA),
        models="MiniCPM3",
        residual_multiplier="residual_scale",
        logits_divisor="logits_scaling",
    ),
    **MIXTURES,
}


def declared(config: Any) -> Family:
    """The entry of FAMILIES for a model with `config`, whose model type must have one."""
    family = FAMILIES[config.model_type]
    if family.rms_norm is not None and getattr(config, family.rms_norm) is not None:
        family = replace(family.with_kinds(lambda one: replace(one, layer_norm=False)), layer_norm=False)
    return family if family.experts is None or experts_of(config) else family.without_experts()


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
    needs = FAMILIES[model_type].needs
    if needs and not hasattr(import_module("transformers.core_model_loading"), needs):
        raise UserError(
            f"a model of type {model_type!r} needs a newer transformers: pip install -U transformers"
        )
    family = declared(config)
    for name, value in family.required:
        got = getattr(config, name, value)
        if any(one != value for one in (got if isinstance(got, list) else [got])):
            raise UserError(
                f"a model of type {model_type!r} must have {name}={value} in its config, got {got}"
            )
    check_lending(config)
    return _fitted(family, experts_of(config), absent_widths(config))


def layer_families(config: Any, layers: int) -> list[Family]:
    """The declaration of each of `layers` decoder layers of a model with `config`.

    Raises UserError as `family_of`.
    """
    family = family_of(config)
    if not family.kinds:
        return [family] * layers
    count, absent = experts_of(config), absent_widths(config)
    kinds = dict(family.kinds)
    of_layers = (layer_kind(config, index) for index in range(layers))
    return [_fitted(kinds[kind], count, absent) if kind in kinds else family for kind in of_layers]


def linears_of(config: Any) -> Iterator[tuple[str, LinearSpec, tuple[int, int]]]:
    """The full name, the declaration and the shape (out, in) of each linear of a model with `config`."""
    for index, family in enumerate(layer_families(config, config.num_hidden_layers)):
        widths = widths_of(config, index)
        for linear in family.linears:
            outputs, inputs = linear.shape
            yield family.full_name(index, linear), linear, (widths[outputs], widths[inputs])


def down_widths(config: Any) -> list[int]:
    """The numbers of inputs of the linears that R3 rotates in a model with `config`, each number once."""
    return list(dict.fromkeys(inputs for _, spec, (_, inputs) in linears_of(config) if spec.input == "r3"))


@functools.cache
def _fitted(family: Family, experts: int, absent: frozenset[Width]) -> Family:
    family = family.without(absent)
    return family if family.experts is None else family.with_experts(experts)
