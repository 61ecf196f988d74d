"""The supported families with a mixture of experts."""

from dataclasses import replace

from drot.model.attentions import hybrid, latent, with_delta_attention, with_gate
from drot.model.convolutions import GRANITE4, LFM2_ATTENTION, with_mamba, with_short_convolutions
from drot.model.dense import GEMMA4, LLAMA, between_norms, inside, with_norms, with_paths
from drot.model.family import Family, InputGroup, LinearSpec
from drot.model.sizes import Width


def files_of_experts(mlp: str, gate: str, up: str, down: str) -> tuple[tuple[str, str], ...]:
    """The `expert_files` of a family whose files have these names for the linears of an expert."""
    names = zip(("gate_proj", "up_proj", "down_proj"), (gate, up, down), strict=True)
    return tuple((part, f"{mlp}.experts.{{}}.{name}.weight") for part, name in names)


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
    expert_files=files_of_experts("mlp", "gate_proj", "up_proj", "down_proj"),
)


def with_shared_experts(
    family: Family, path: str, gate: str | None = None, width: Width = "shared"
) -> Family:
    """The mixture with experts at `path` that read all tokens. They are pruned after the others, so that
    with `target="dense"` their outputs make up for the errors of the others.

    gate: the module whose sigmoid multiplies their outputs. width: of their outputs of gate and up.
    """
    mlp = InputGroup(
        name="shared",
        norm="post_attention_layernorm",
        linears=(
            LinearSpec(f"{path}.gate_proj", (width, "hidden"), input="r1"),
            LinearSpec(f"{path}.up_proj", (width, "hidden"), input="r1"),
        ),
    )
    down = LinearSpec(f"{path}.down_proj", ("hidden", width), input="r3", output="r1")
    shared = InputGroup(name="shared_down", linears=(down,), weighted=gate is not None)
    unpruned = () if gate is None else ((gate, "post_attention_layernorm"),)
    return replace(family, groups=(*family.groups, mlp, shared), unpruned=(*family.unpruned, *unpruned))


def with_indexer(family: Family, *, returned: bool = False) -> Family:
    """The family with latent attention to those tokens alone that an indexer in each layer chooses.

    R1 rotates the linears of the indexer that read the stream, which are never pruned. Another one reads the
    latent of the queries, which nothing rotates.

    returned: as `returns_choice` of a family.
    """
    readers = ("self_attn.indexer.wk", "self_attn.indexer.weights_proj")
    return replace(
        family,
        untouched=(*family.untouched, "self_attn.indexer.wq_b", "self_attn.indexer.k_norm"),
        unpruned=(*family.unpruned, *((path, "input_layernorm") for path in readers)),
        kinds=tuple((kind, with_indexer(one, returned=returned)) for kind, one in family.kinds),
        returns_choice=returned,
    )


def with_mlp_at(family: Family, mlp: str) -> Family:
    """The mixture with another name of the module around the experts, which all its layers have."""

    def moved(path: str) -> str:
        return mlp + path.removeprefix("mlp") if path.startswith("mlp.") else path

    def group_at(group: InputGroup) -> InputGroup:
        linears = (replace(linear, path=moved(linear.path)) for linear in group.linears)
        return replace(group, linears=tuple(linears))

    assert family.experts is not None and family.router is not None
    return replace(
        family,
        mlp=mlp,
        experts=moved(family.experts),
        router=moved(family.router),
        groups=tuple(map(group_at, family.groups)),
        kinds=(),
    )


def with_dense_layers(family: Family, dense: Family) -> Family:
    """The mixture some of whose layers, of each of its kinds, are those of `dense`."""
    kinds = (("dense", dense), *((f"{kind} dense", one) for kind, one in dense.kinds))
    return replace(family, kinds=(*family.kinds, *kinds))


def with_shared_mlp(family: Family) -> Family:
    """The mixture of Granite with an MLP beside its experts that reads all tokens, pruned after them."""
    gate, up = (
        LinearSpec("shared_mlp.input_linear", ("shared", "hidden"), input="r1", part=part)
        for part in ("gate_proj", "up_proj")
    )
    down = LinearSpec("shared_mlp.output_linear", ("hidden", "shared"), input="r3", output="r1")
    shared = (
        InputGroup(name="shared", norm="post_attention_layernorm", linears=(gate, up)),
        InputGroup(name="shared_down", linears=(down,)),
    )
    return replace(family, groups=(*family.groups, *shared), beside="shared_mlp", activation="activation")


#: A mixture with shared experts without a gate.
SHARED = with_shared_experts(MIXTURE, "mlp.shared_experts")
#: the names in files of the experts of Mixtral, as `expert_files`
W1_W3_W2 = files_of_experts("block_sparse_moe", "w1", "w3", "w2")
#: the name in files of the sinks of Flint's attention, as `files`
SINKS_OF_FLINT = (("self_attn.sinks", "self_attn.softmax_offset"),)

#: The experts of Granite, whose files hold those of a layer together.
GRANITE_MOE = replace(
    with_mlp_at(replace(MIXTURE, router="mlp.router"), "block_sparse_moe"),
    models="Granite 3 MoE",
    residual_multiplier="residual_multiplier",
    logits_divisor="logits_scaling",
    expert_files=(),
    files=(
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
        ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.router.", "block_sparse_moe.router.layer."),
    ),
    needs="GroupWeightRename",  # an older transformers has other modules
)


def with_experts_beside(family: Family) -> Family:
    """Gemma 4, also its layers of other kinds, with experts beside the MLP, which are pruned before it.

    They and their router read the stream, each by a norm of its own.
    """
    paths = {f"mlp.experts.{name}": f"experts.{name}" for name in ("gate_up_proj", "down_proj")}
    experts = with_norms(inside(with_paths(MIXTURE, paths)), None, "pre_feedforward_layernorm_2").groups[2:]
    return replace(
        family,
        experts="experts",
        experts_beside=(
            "router",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
        ),
        groups=(*family.groups[:2], *experts, *family.groups[2:]),
        kinds=tuple((kind, with_experts_beside(one)) for kind, one in family.kinds),
    )


#: `model_type` of a config.json → family
MIXTURES = {
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
    "qwen3_5_moe_text": replace(
        hybrid(
            replace(with_shared_experts(MIXTURE, "mlp.shared_expert", "mlp.shared_expert_gate"), kinds=()),
            {"in_proj_qkv": "linear_qkv", "in_proj_z": "linear_value"},
            ("in_proj_b", "in_proj_a"),
        ),
        models="Qwen3.5 MoE",
        needs="PrefixChange",
    ),
    "glm4_moe": replace(SHARED, models="GLM-4.5, GLM-4.6, GLM-4.7"),
    "deepseek_v3": replace(latent(SHARED), models="DeepSeek-V3, DeepSeek-R1"),
    "gpt_oss": replace(
        MIXTURE.with_transposed_experts(),
        models="gpt-oss",
        gated="_apply_gate",
        router="mlp.router",
        expert_files=(),
        kinds=(),
    ),
    "mixtral": replace(
        MIXTURE, models="Mixtral", expert_files=W1_W3_W2, files=(("mlp.", "block_sparse_moe."),)
    ),
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": replace(with_shared_mlp(GRANITE_MOE), models="Granite MoE with shared experts"),
    "granitemoe_swa": replace(with_shared_mlp(GRANITE_MOE), models="Granite Swash MoE", files=()),
    # an older transformers names the kinds of layers in another way
    "granitemoehybrid": with_mamba(
        replace(
            with_shared_mlp(GRANITE_MOE),
            models="Granite 4.0",
            kinds=(("dense", GRANITE4),),
        )
    ),
    "gemma4_text": replace(
        with_dense_layers(with_experts_beside(GEMMA4), GEMMA4), models="Gemma 4 31B, Gemma 4 26B-A4B"
    ),
    "hunyuan_v1_moe": replace(
        with_shared_experts(MIXTURE, "mlp.shared_mlp", width="mlp"),
        models="Hunyuan-A13B",
        router="mlp.gate.wg",
        untouched=("self_attn.query_layernorm", "self_attn.key_layernorm"),
        kinds=(),
    ),
    "minimax_m2": replace(
        MIXTURE,
        models="MiniMax-M2",
        expert_files=W1_W3_W2,
        files=(("mlp.", "block_sparse_moe."),),
        kinds=(),
    ),
    "glm4_moe_lite": replace(latent(SHARED), models="GLM-4.7-Flash"),
    "olmoe": replace(MIXTURE, models="OLMoE", required=(("clip_qkv", None),), kinds=()),
    "ernie4_5_moe": replace(
        SHARED,
        models="ERNIE 4.5 MoE",
        files=(("mlp.gate.moe_statics.", "mlp.moe_statics."),),
        required=(("use_bias", False),),
    ),
    "deepseek_v2": replace(
        latent(SHARED),
        models="DeepSeek-V2",
        needs="GroupWeightRename",  # an older transformers chooses the experts elsewhere
    ),
    "lfm2_moe": with_short_convolutions(
        replace(
            LFM2_ATTENTION,
            models="LFM2 MoE",
            experts="feed_forward.experts",
            router="feed_forward.gate",
            groups=(
                *LFM2_ATTENTION.groups[:2],
                replace(with_mlp_at(MIXTURE, "feed_forward").groups[2], norm="ffn_norm"),
                with_mlp_at(MIXTURE, "feed_forward").groups[3],
            ),
            kinds=(("dense", LFM2_ATTENTION),),
            expert_files=files_of_experts("feed_forward", "w1", "w3", "w2"),
        )
    ),
    "dots1": replace(SHARED, models="dots.llm1"),
    "solar_open": replace(SHARED, models="Solar Open", kinds=()),
    "exaone_moe": replace(
        SHARED,
        models="K-EXAONE",
        files=(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),),
    ),
    "hy_v3": replace(
        SHARED,
        models="Hy3",
        files=(
            ("mlp.gate.weight", "mlp.router.gate.weight"),
            ("mlp.e_score_correction_bias", "mlp.expert_bias"),
            ("mlp.shared_experts.", "mlp.shared_mlp."),
        ),
    ),
    "mellum": replace(MIXTURE, models="Mellum 2"),
    "flint": replace(
        with_shared_experts(MIXTURE, "mlp.shared_expert"),
        models="Flint",
        files=SINKS_OF_FLINT,
        kinds=(("dense", replace(LLAMA, files=SINKS_OF_FLINT)),),
    ),
    "kolibri1": replace(
        between_norms(
            SHARED,
            ("input_layernorm", "post_attention_layernorm"),
            ("post_self_attn_layernorm", "post_mlp_layernorm"),
        ),
        models="Kolibri 1",
        files=(
            ("mlp.gate.e_score_correction_bias", "moe.router.expert_bias"),
            ("post_self_attn_layernorm.", "post_attn_norm."),
            ("post_mlp_layernorm.", "post_ffn_norm."),
        ),
        kinds=(),
    ),
    "laguna": with_gate(
        replace(
            SHARED,
            models="Laguna",
            files=(
                ("mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias"),
                ("mlp.shared_experts.", "mlp.shared_expert."),
            ),
        ),
        "self_attn.g_proj",
    ),
    "afmoe": with_gate(
        between_norms(
            replace(SHARED, models="Trinity", router="mlp.router.gate"),
            ("input_layernorm", "pre_mlp_layernorm"),
            ("post_attention_layernorm", "post_mlp_layernorm"),
        ),
        "self_attn.gate_proj",
    ),
    "kimi_linear": with_delta_attention(
        replace(
            latent(SHARED),
            models="Kimi Linear",
            expert_files=W1_W3_W2,
            files=(("mlp.", "block_sparse_moe."),),
        )
    ),
    "sarvam_mla": replace(latent(SHARED), models="Sarvam 105B"),
    "deepseek_v32": replace(with_indexer(latent(SHARED)), models="DeepSeek-V3.2"),
    "glm_moe_dsa": replace(
        with_indexer(latent(SHARED), returned=True),
        models="GLM-5",
        required=(("indexer_types", "full"),),
        needs="GroupWeightRename",  # the layers of an older transformers return the stream alone
    ),
}
