"""The supported families with a mixture of experts."""

from dataclasses import replace

from drot.model.attentions import hybrid, latent, with_delta_attention, with_gate, with_value_heads
from drot.model.convolutions import GRANITE4, LFM2_ATTENTION, with_mamba, with_short_convolutions
from drot.model.dense import COHERE, GEMMA4, LLAMA, behind_norms, between_norms, with_norms
from drot.model.expert_layers import (
    MIXTURE,
    files_of_experts,
    with_dense_layers,
    with_experts_beside,
    with_indexer,
    with_mlp_at,
    with_shared_experts,
    with_shared_mlp,
)
from drot.model.one_block import NEMOTRON_H

#: A mixture with shared experts without a gate.
SHARED = with_shared_experts(MIXTURE, "mlp.shared_experts")
#: the names in files of the experts of Mixtral, as `expert_files`
W1_W3_W2 = files_of_experts("block_sparse_moe", "w1", "w3", "w2")
#: the names in files of the sinks of an attention, as `files`
SINKS_OF_FLINT = (("self_attn.sinks", "self_attn.softmax_offset"),)
SINKS_OF_MIMO = (("self_attn.sinks", "self_attn.attention_sink_bias"),)

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
        MIXTURE.with_linears(lambda one: replace(one, transposed=one.path.startswith("mlp.experts."))),
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
        with_dense_layers(with_experts_beside(GEMMA4), GEMMA4),
        models="Gemma 4 31B, Gemma 4 26B-A4B, Gemma 4 E4B, Gemma 4 E2B",
    ),
    "hunyuan_v1_moe": replace(
        with_shared_experts(MIXTURE, "mlp.shared_mlp", width="mlp"),
        models="Hunyuan-A13B",
        router="mlp.gate.wg",
        in_fp32=("mlp.gate.wg.",),
        untouched=("self_attn.query_layernorm", "self_attn.key_layernorm"),
        kinds=(),
    ),
    "nemotron_h": NEMOTRON_H,
    "minimax_m2": replace(
        MIXTURE,
        models="MiniMax-M2",
        expert_files=W1_W3_W2,
        files=(("mlp.", "block_sparse_moe."),),
        kinds=(),
    ),
    "glm4_moe_lite": replace(latent(SHARED), models="GLM-4.7-Flash"),
    "olmoe": replace(MIXTURE, models="OLMoE", required=(("clip_qkv", None),), kinds=()),
    "flex_olmo": replace(behind_norms(MIXTURE), models="FlexOlmo", kinds=()),
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
            in_fp32=("feed_forward.expert_bias",),
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
    "mistral4": replace(latent(SHARED), models="Mistral Small 4", expert_files=()),
    "mimo_v2_flash": with_value_heads(
        replace(
            MIXTURE,
            models="MiMo-V2-Flash",
            files=SINKS_OF_MIMO,
            kinds=(("dense", replace(LLAMA, files=SINKS_OF_MIMO)),),
        )
    ),
    "cohere2_moe": replace(
        with_norms(
            with_shared_experts(MIXTURE, "mlp.shared_experts", weighted=True), *2 * ("input_layernorm",)
        ),
        models="North Mini Code, Command A+ (text)",
        layer_norm=True,
        parallel=True,
        logits_multiplier="logit_scale",
        tied_elsewhere=True,
        kinds=(("dense", COHERE),),
        rms_norm="rms_norm_eps",
    ),
    "deepseek_v32": replace(with_indexer(latent(SHARED)), models="DeepSeek-V3.2"),
    "glm_moe_dsa": replace(
        with_indexer(latent(SHARED), returned=True),
        models="GLM-5",
        required=(("indexer_types", "full"),),
        needs="GroupWeightRename",  # the layers of an older transformers return the stream alone
    ),
}
