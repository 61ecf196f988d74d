"""The supported model families, each a declaration of where its weights lie and how rotations act on them.

Nothing outside of drot/model knows the name of a module. A new family is a new entry of FAMILIES, and a small
model in tests/small_models.py, on which the tests check that rotations leave the outputs unchanged.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from drot.core.errors import UserError
from drot.model.dense import (
    COHERE,
    GEMMA4,
    LLAMA,
    OPT,
    POST_NORM,
    SANDWICH,
    inside,
    with_norms,
    without_gate,
)
from drot.model.family import Family, InputGroup, LinearSpec
from drot.model.sizes import Width, experts_of, layer_kind, widths_of

#: Experts in place of the MLP. Each has its own blocks of R3.
MIXTURE = replace(
    LLAMA,
    experts="mlp.experts",
    router="mlp.gate",
    groups=(
        *LLAMA.groups[:2],
        InputGroup(
            name="mlp",
            norm="post_attention_layernorm",
            linears=(
                LinearSpec("mlp.experts.gate_up_proj", ("expert", "hidden"), input="r1", part="gate_proj"),
                LinearSpec("mlp.experts.gate_up_proj", ("expert", "hidden"), input="r1", part="up_proj"),
            ),
            routed=True,
        ),
        InputGroup(
            name="down",
            linears=(
                LinearSpec(
                    "mlp.experts.down_proj", ("hidden", "expert"), input="r3", output="r1", part="down_proj"
                ),
            ),
            routed=True,
        ),
    ),
    kinds=(("dense", LLAMA),),
    expert_files=(
        ("gate_proj", "mlp.experts.{}.gate_proj.weight"),
        ("up_proj", "mlp.experts.{}.up_proj.weight"),
        ("down_proj", "mlp.experts.{}.down_proj.weight"),
    ),
    router_file="mlp.gate.weight",
)


def with_shared_experts(family: Family, path: str, gate: str | None = None) -> Family:
    """The mixture with experts at `path` that read all tokens. They are pruned after the others, so that
    with `target="dense"` their outputs make up for the errors of the others.

    gate: the module whose sigmoid multiplies their outputs.
    """
    mlp = InputGroup(
        name="shared",
        norm="post_attention_layernorm",
        linears=(
            LinearSpec(f"{path}.gate_proj", ("shared", "hidden"), input="r1"),
            LinearSpec(f"{path}.up_proj", ("shared", "hidden"), input="r1"),
        ),
    )
    down = LinearSpec(f"{path}.down_proj", ("hidden", "shared"), input="r3", output="r1")
    shared = InputGroup(name="shared_down", linears=(down,), weighted=gate is not None)
    unpruned = () if gate is None else ((gate, "post_attention_layernorm"),)
    return replace(family, groups=(*family.groups, mlp, shared), unpruned=(*family.unpruned, *unpruned))


#: The attention of Qwen3-Next multiplies its values by a gate that comes from q_proj, so that no R2 passes.
GATED_ATTENTION = (
    InputGroup(
        name="attention",
        norm="input_layernorm",
        linears=(
            LinearSpec("self_attn.q_proj", ("gated_query", "hidden"), input="r1"),
            LinearSpec("self_attn.k_proj", ("kv", "hidden"), input="r1"),
            LinearSpec("self_attn.v_proj", ("kv", "hidden"), input="r1"),
        ),
    ),
    InputGroup(name="o", linears=(LinearSpec("self_attn.o_proj", ("hidden", "query"), output="r1"),)),
)


#: A latent attention (MLA): R1 rotates what reads the stream and what writes it. Norms of the latents follow,
#: and a head's values lie between its keys in one linear, which no R2 rotates here.
LATENT_ATTENTION = (
    InputGroup(
        name="attention",
        norm="input_layernorm",
        linears=(
            LinearSpec("self_attn.q_a_proj", ("latent_q", "hidden"), input="r1"),
            LinearSpec("self_attn.kv_a_proj_with_mqa", ("latent_kv_rope", "hidden"), input="r1"),
        ),
    ),
    InputGroup(name="q_b", linears=(LinearSpec("self_attn.q_b_proj", ("mla_query", "latent_q")),)),
    InputGroup(name="kv_b", linears=(LinearSpec("self_attn.kv_b_proj", ("mla_kv", "latent_kv")),)),
    InputGroup(name="o", linears=(LinearSpec("self_attn.o_proj", ("hidden", "mla_value"), output="r1"),)),
)


def latent(family: Family) -> Family:
    """The family with LATENT_ATTENTION in all its layers."""
    return replace(
        family,
        groups=(*LATENT_ATTENTION, *family.groups[2:]),
        untouched=("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
        kinds=tuple((kind, latent(one)) for kind, one in family.kinds),
    )


def hybrid(family: Family, inputs: dict[str, Width], unpruned: tuple[str, ...]) -> Family:
    """The family with GATED_ATTENTION, some of whose layers have a linear attention instead (Gated DeltaNet).

    Its norms multiply by 1 + γ. Behind its linears a linear attention has a convolution, norms of each head
    and a gate, so that no R2 passes.

    inputs: linear of the linear attention → the width of its outputs. unpruned: its linears with one or two
        outputs for each head, which are rotated alone.
    """
    family = replace(
        family,
        norm_offset=1.0,
        groups=(*GATED_ATTENTION, *family.groups[2:]),
        kinds=tuple(
            (kind, replace(one, norm_offset=1.0, groups=(*GATED_ATTENTION, *one.groups[2:])))
            for kind, one in family.kinds
        ),
    )
    linears = tuple(
        LinearSpec(f"linear_attn.{one}", (width, "hidden"), input="r1") for one, width in inputs.items()
    )
    attention = InputGroup(name="attention", norm="input_layernorm", linears=linears)
    out = LinearSpec("linear_attn.out_proj", ("hidden", "linear_value"), output="r1")

    def linear(one: Family) -> Family:
        return replace(
            one,
            attention="linear_attn",
            linear_attention=True,
            groups=(attention, InputGroup(name="o", linears=(out,)), *one.groups[2:]),
            untouched=("linear_attn", "linear_attn.conv1d", "linear_attn.norm"),
            unpruned=(*one.unpruned, *((f"linear_attn.{path}", "input_layernorm") for path in unpruned)),
            kinds=(),
        )

    kinds = [("linear", linear(family)), *((f"linear {kind}", linear(one)) for kind, one in family.kinds)]
    return replace(family, kinds=(*family.kinds, *kinds))


#: `model_type` of a config.json → family
FAMILIES = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, models="Mistral"),
    "ministral3": replace(LLAMA, models="Ministral 3"),
    "qwen2": replace(LLAMA, models="Qwen2, Qwen2.5"),
    "qwen3": replace(LLAMA, models="Qwen3"),
    "smollm3": replace(LLAMA, models="SmolLM3"),
    "ernie4_5": replace(LLAMA, models="ERNIE 4.5"),
    "hunyuan_v1_dense": replace(
        LLAMA, models="Hunyuan", untouched=("self_attn.query_layernorm", "self_attn.key_layernorm")
    ),
    "cwm": replace(LLAMA, models="Code World Model"),
    # its multiplier of the embedding commutes with rotations
    "gemma": replace(LLAMA, models="Gemma 1", norm_offset=1.0),
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
    "exaone4": replace(POST_NORM, models="EXAONE 4"),
    "gemma2": replace(SANDWICH, models="Gemma 2"),
    "gemma3_text": replace(SANDWICH, models="Gemma 3"),
    "gemma4_text": replace(GEMMA4, models="Gemma 4 31B"),
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
    "arcee": replace(without_gate(LLAMA), models="AFM-4.5B"),
    "apertus": replace(
        with_norms(without_gate(LLAMA), "attention_layernorm", "feedforward_layernorm"),
        models="Apertus",
        untouched=(*LLAMA.untouched, "mlp.act_fn"),
    ),
    "qwen3_moe": replace(MIXTURE, models="Qwen3 MoE"),
    "qwen2_moe": replace(
        with_shared_experts(MIXTURE, "mlp.shared_expert", "mlp.shared_expert_gate"), models="Qwen2 MoE"
    ),
    "qwen3_next": replace(
        hybrid(
            with_shared_experts(MIXTURE, "mlp.shared_expert", "mlp.shared_expert_gate"),
            {"in_proj_qkvz": "linear_qkvz"},
            ("in_proj_ba",),
        ),
        models="Qwen3-Next",
    ),
    "qwen3_5_text": replace(
        hybrid(LLAMA, {"in_proj_qkv": "linear_qkv", "in_proj_z": "linear_value"}, ("in_proj_b", "in_proj_a")),
        models="Qwen3.5",
        needs="PrefixChange",
    ),
    "qwen3_5_moe_text": replace(
        hybrid(
            replace(with_shared_experts(MIXTURE, "mlp.shared_expert", "mlp.shared_expert_gate"), kinds=()),
            {"in_proj_qkv": "linear_qkv", "in_proj_z": "linear_value"},
            ("in_proj_b", "in_proj_a"),
        ),
        models="Qwen3.5 MoE",
        needs="PrefixChange",
    ),
    "glm4_moe": replace(
        with_shared_experts(MIXTURE, "mlp.shared_experts"), models="GLM-4.5, GLM-4.6, GLM-4.7"
    ),
    "deepseek_v3": replace(
        latent(with_shared_experts(MIXTURE, "mlp.shared_experts")),
        models="DeepSeek-V3, DeepSeek-R1",
        needs="PrefixChange",  # an older transformers loads the bias of the router in another dtype
    ),
    "youtu": replace(latent(LLAMA), models="Youtu-LLM"),
    "minicpm3": replace(
        latent(LLAMA),
        models="MiniCPM3",
        residual_multiplier="residual_scale",
        logits_divisor="logits_scaling",
    ),
    "gpt_oss": replace(
        MIXTURE.with_transposed_experts(),
        models="gpt-oss",
        gated="_apply_gate",
        router="mlp.router",
        expert_files=(),
        router_file="mlp.router.weight",
        kinds=(),
    ),
    "mixtral": replace(
        MIXTURE,
        models="Mixtral",
        expert_files=(
            ("gate_proj", "block_sparse_moe.experts.{}.w1.weight"),
            ("up_proj", "block_sparse_moe.experts.{}.w3.weight"),
            ("down_proj", "block_sparse_moe.experts.{}.w2.weight"),
        ),
        experts_file="block_sparse_moe.experts",
        router_file="block_sparse_moe.gate.weight",
    ),
}


def family_of(config: Any) -> Family:
    """The family of a model with `config`, with the groups of each of its experts.

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
    return _with_experts(family, experts_of(config))


def layer_families(config: Any, layers: int) -> list[Family]:
    """The declaration of each of `layers` decoder layers of a model with `config`.

    Raises UserError as `family_of`.
    """
    family = family_of(config)
    kinds = dict(family.kinds)
    of_layers = (layer_kind(config, index) for index in range(layers))
    count = experts_of(config)
    return [_with_experts(kinds[kind], count) if kind else family for kind in of_layers]


def linear_names(config: Any) -> Iterator[tuple[str, LinearSpec]]:
    """The full name and the declaration of each linear of a model with `config`."""
    for index, family in enumerate(layer_families(config, config.num_hidden_layers)):
        for linear in family.linears:
            yield family.full_name(index, linear), linear


def linear_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """The full name and the shape (out, in) of each linear of a model with `config`."""
    found = {}
    for index, family in enumerate(layer_families(config, config.num_hidden_layers)):
        widths = widths_of(config, index)
        for linear in family.linears:
            outputs, inputs = linear.shape
            found[family.full_name(index, linear)] = widths[outputs], widths[inputs]
    return found


def down_widths(config: Any) -> list[int]:
    """The numbers of inputs of the linears that R3 rotates in a model with `config`, each number once."""
    shapes = linear_shapes(config)
    return list(dict.fromkeys(shapes[name][1] for name, spec in linear_names(config) if spec.input == "r3"))


@functools.cache
def _with_experts(family: Family, count: int) -> Family:
    return family if family.experts is None else family.with_experts(count)
