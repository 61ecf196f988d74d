"""The declarations of families without experts, from which families.py makes its entries."""

from collections.abc import Mapping
from dataclasses import replace

from drot.model.family import Family, block, reads, writes

#: Pre-norm attention with grouped queries, then a pre-norm gated MLP. The norms of each head in Qwen3, and
#: the factor of the queries by their position in Ministral 3, act on the outputs of q_proj and k_proj, which
#: are not rotated.
LLAMA = Family(
    models="LLaMA 1–3",
    attention="self_attn",
    mlp="mlp",
    untouched=("self_attn.q_norm", "self_attn.k_norm"),
    groups=(
        *block(
            ("attention", "o"),
            "input_layernorm",
            (
                reads("self_attn.q_proj", "query"),
                reads("self_attn.k_proj", "kv"),
                reads("self_attn.v_proj", "kv", output="r2"),
            ),
            writes("self_attn.o_proj", "query", input="r2"),
        ),
        *block(
            ("mlp", "down"),
            "post_attention_layernorm",
            (reads("mlp.gate_proj", "mlp"), reads("mlp.up_proj", "mlp")),
            writes("mlp.down_proj", "mlp", input="r3"),
        ),
    ),
)

#: The multipliers of the embedding, of the attention's scores and of the logits commute with rotations.
GRANITE = replace(LLAMA, residual_multiplier="residual_multiplier", logits_divisor="logits_scaling")


def inside(family: Family) -> Family:
    """The family whose stream nothing rotates: R1 acts on the inputs of attention and MLP alone."""

    return family.with_linears(lambda one: replace(one, output=None if one.output == "r1" else one.output))


def with_norms(family: Family, attention: str | None, mlp: str | None) -> Family:
    """The family with other norms in front of its attention and its MLP."""
    first, *others = family.groups
    others = [replace(group, norm=mlp) if group.norm else group for group in others]
    return replace(family, groups=(replace(first, norm=attention), *others))


def between_norms(family: Family, before: tuple[str, str], behind: tuple[str, str]) -> Family:
    """The family with a norm before its attention and its MLP and a norm behind each, in all its layers."""
    found = replace(with_norms(inside(family), *before), post_norms=behind)
    return found.with_kinds(lambda one: between_norms(one, before, behind))


def with_paths(family: Family, paths: Mapping[str, str]) -> Family:
    """The family some of whose linears lie elsewhere. paths: path → the other path."""

    return family.with_linears(lambda one: replace(one, path=paths.get(one.path, one.path)))


def without_gate(family: Family, up: str = "mlp.up_proj", down: str = "mlp.down_proj") -> Family:
    """The family with an MLP of two linears, whose activation fixes the order of the second's inputs."""
    attention, o, mlp, second = family.groups
    last = replace(second.linears[0], path=down, input=None)
    first = replace(mlp, linears=(reads(up, "mlp"),))
    return replace(family, groups=(attention, o, first, replace(second, linears=(last,))))


def without_r2(family: Family, *lacking: str) -> Family:
    """The family without R2, and without the linears of its attention whose paths are in `lacking`."""
    attention, o, *mlp = family.groups
    linears = (replace(one, output=None) if one.output == "r2" else one for one in attention.linears)
    (o_proj,) = o.linears
    attention = replace(attention, linears=tuple(one for one in linears if one.path not in lacking))
    return replace(family, groups=(attention, replace(o, linears=(replace(o_proj, input=None),)), *mlp))


def behind_norms(family: Family) -> Family:
    """The family with norms behind attention and MLP, and none in front of them.

    The weight of such a norm acts between a block and the stream, where no rotation passes it.
    """
    behind = "post_attention_layernorm", "post_feedforward_layernorm"
    return replace(with_norms(inside(family), None, None), post_norms=behind)


#: LLaMA with norms behind attention and MLP.
POST_NORM = behind_norms(LLAMA)
#: Norms on both sides of attention and MLP.
SANDWICH = replace(
    between_norms(
        LLAMA,
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    logits_cap="final_logit_softcapping",
)
#: the modules of `Family.embedded` in Gemma 4 E2B and E4B
EMBEDDING = "per_layer_input_gate", "act_fn", "per_layer_projection", "post_per_layer_input_norm"
_GEMMA4 = replace(
    SANDWICH,
    output_multiplier="layer_scalar",
    embedded=EMBEDDING,
    untouched=(*SANDWICH.untouched, *EMBEDDING),
    token_embeddings=(
        "model.embed_tokens_per_layer",
        "model.per_layer_model_projection",
        "model.per_layer_projection_norm",
    ),
)
#: The values of a head pass a norm without weight, which R2 commutes with. Where the keys are the values too,
#: or the values of several layers, there is no R2.
GEMMA4 = replace(
    _GEMMA4,
    kinds=(
        ("keys", without_r2(_GEMMA4, "self_attn.v_proj")),  # the outputs of k_proj are the values too
        ("lends", without_r2(_GEMMA4)),
        ("borrows", without_r2(_GEMMA4, "self_attn.k_proj", "self_attn.v_proj")),
    ),
    needs="GroupWeightRename",  # an older config has no sizes of each layer
)
#: LayerNorms without a shift, and an MLP beside the attention.
COHERE = replace(
    with_norms(LLAMA, "input_layernorm", "input_layernorm"),
    layer_norm=True,
    parallel=True,
    logits_multiplier="logit_scale",
    tied_elsewhere=True,
)
#: LayerNorms with a shift, an MLP without gate that is no module of its own, learned positions, and heads
#: that share no keys. Its activation fixes the order of fc2's inputs but for permutations.
OPT = replace(
    with_norms(
        with_paths(without_gate(LLAMA, "fc1", "fc2"), {"self_attn.o_proj": "self_attn.out_proj"}),
        "self_attn_layer_norm",
        "final_layer_norm",
    ),
    models="OPT",
    untouched=(),
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
)
