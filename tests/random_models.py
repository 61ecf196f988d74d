"""Hypothesis strategies for small random models of every supported family."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from small_models import FAMILIES, is_available, random_tokens, small_model
from torch import nn
from transformers import CONFIG_MAPPING

#: the plain members of FAMILIES, whose settings `settings_of_models` replaces
BARE = sorted({family.partition("-")[0] for family in FAMILIES if is_available(family)})


def having(*names: str) -> dict[str, str]:
    """Family → which entry of `names` its config has, of those small models that have one."""
    return {
        family.partition("-")[0]: name
        for family, settings in FAMILIES.items()
        for name in names
        if name in settings
    }


#: mixture of experts → the entry of its config with the number of experts
MIXTURES = having("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: Granite's mixtures
GRANITE = ("granitemoe", "granitemoeshared", "granitemoe_swa", "granitemoehybrid")
#: mixtures whose router divides the experts into groups
GROUPED = (
    *("glm4_moe", "deepseek_v3", "glm4_moe_lite", "dots1", "solar_open", "exaone_moe", "deepseek_v32"),
    *("glm_moe_dsa", "sarvam_mla", "kimi_linear", "mistral4", "mimo_v2_flash"),
)
#: those whose router computes in fp32
OTHERS_IN_FP32 = ("nemotron_h", "ernie4_5_moe", "deepseek_v2", "hy_v3", "flint", "kolibri1", "hunyuan_v1_moe")
ROUTERS_IN_FP32 = (*GROUPED, *OTHERS_IN_FP32)
#: mixture of experts → the entry of its config with the number of shared experts
SHARED = having("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
del SHARED["nemotron_h"]  # whose entry with their width counts
#: families whose shared experts have a width of their own
SHARED_WIDTH = having("shared_expert_intermediate_size")
#: families some of whose layers have a linear attention
LINEAR_ATTENTION = having("linear_num_key_heads")
#: families some of whose layers have a short convolution or a Mamba → the name of such a layer
CONVOLUTIONS = {"lfm2": "conv", "lfm2_moe": "conv", "lfm3": "conv", "granitemoehybrid": "linear_attention"}
#: those whose full attention has heads of another size
GEMMA4 = having("global_head_dim")
#: families with a latent attention
LATENT_ATTENTION = having("kv_lora_rank")
#: those whose config demands a hidden size that the heads divide
DIVIDED = (
    *("llama", "exaone", "cwm", "arcee", "minicpm3", "gemma2", "gemma3_text", "deepseek_v2"),
    *("internlm3", "iquestcoder", "hyperclovax", "jais2", "vaultgemma"),
)
#: those without a head_dim of their own
ONE_HEAD_DIM = (
    *("phi3", "cohere", "cohere2", "opt", "olmoe", "flex_olmo", "lfm2", "lfm2_moe", "granitemoehybrid"),
)
#: families some of whose layers attend to the last tokens alone, but for LFM3, which is in CONVOLUTIONS
SLIDING = {f for f, settings in FAMILIES.items() if "sliding_attention" in settings.get("layer_types", ())}
SLIDING = SLIDING - {"lfm3"} | {"gemma2"}
#: positions that a model was trained for, beyond which RoPE is scaled
ORIGINAL_POSITIONS = 16


def _rope(draw: st.DrawFn, family: str, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of config.json, and `max_position_embeddings` that goes with them."""
    if family == "phi3":
        return _rope_of_phi3(draw, head_dim)
    # theirs has parts for each type of layer, or there is none
    if family in (
        "olmo3",
        "gemma3_text",
        "opt",
        "mellum",
        "laguna",
        "lfm3",
        "nemotron_h",
        "mimo_v2_flash",
        *GEMMA4,
    ):
        return {"max_position_embeddings": 128}
    if family == "mistral4":
        rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.5}
        rope["original_max_position_embeddings"] = ORIGINAL_POSITIONS
        return {"rope_parameters": rope, "max_position_embeddings": 128}
    if family in LATENT_ATTENTION:  # it turns a part of a head of its own
        return {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "max_position_embeddings": 128,
        }
    if family in LINEAR_ATTENTION:
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        return {"rope_parameters": rope, "max_position_embeddings": 128}
    if family in ("glm", "glm4", "glm4_moe", "minimax_m2"):  # they turn a share of a head, in pairs
        rope = {"rope_type": "default", "rope_theta": 1e4}
        rope |= {"partial_rotary_factor": draw(st.sampled_from([1.0, 0.5] if head_dim % 4 == 0 else [1.0]))}
        return {"rope_parameters": rope, "max_position_embeddings": 128}
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3"]))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from([100.0, 1e4, 5e5]))}
    if kind != "default":
        rope["factor"] = draw(st.sampled_from([1.5, 2.0, 8.0]))
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = ORIGINAL_POSITIONS
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if family == "ministral3":  # it multiplies queries beyond the original positions
        rope |= {"original_max_position_embeddings": ORIGINAL_POSITIONS}
        rope["llama_4_scaling_beta"] = draw(st.sampled_from([0.0, 0.1, 1.0]))
    # `dynamic` scales beyond this number of positions, `yarn` expects factor · original
    positions = {"dynamic": ORIGINAL_POSITIONS, "yarn": int(ORIGINAL_POSITIONS * rope.get("factor", 1))}
    return {"rope_parameters": rope, "max_position_embeddings": positions.get(kind, 128)}


def _rope_of_phi3(draw: st.DrawFn, head_dim: int) -> dict[str, Any]:
    """The same for Phi-3, which turns a share of a head, and has one set of factors for long sequences."""
    share = draw(st.sampled_from([1.0, 0.5] if head_dim % 4 == 0 else [1.0]))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    if draw(st.booleans()):
        pairs = int(head_dim * share) // 2
        factors = {f"{part}_factor": draw(_FACTORS)[:pairs] for part in ("short", "long")}
        rope |= factors | {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL_POSITIONS}
    return {
        "rope_parameters": rope,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": ORIGINAL_POSITIONS,
    }


def _mixture(draw: st.DrawFn, family: str, multiple: int, layers: int) -> dict[str, Any]:
    """The settings of a mixture of experts."""
    experts = draw(st.integers(1, 4))
    chosen: dict[str, Any] = {MIXTURES[family]: experts, "num_experts_per_tok": draw(st.integers(1, experts))}
    one_width = "mixtral", "gpt_oss", "minimax_m2", "olmoe", "flex_olmo", "hunyuan_v1_moe", "cohere2_moe"
    if family not in (*one_width, *GRANITE):
        chosen["moe_intermediate_size"] = draw(st.integers(1, 24 // multiple)) * multiple
    others = "mixtral", "gpt_oss", "minimax_m2", "hy_v3", "ernie4_5_moe", "hunyuan_v1_moe", "gemma4_text"
    if family not in (*others, *GRANITE):
        chosen["norm_topk_prob"] = draw(st.booleans())
    if family in GRANITE[1:]:
        chosen["shared_intermediate_size"] = draw(st.integers(1, 24 // multiple)) * multiple
    if family in GRANITE[1:3] and draw(st.booleans()):
        chosen["shared_intermediate_size"] = 0
    if family == "granitemoehybrid" and draw(st.booleans()):
        chosen["num_local_experts"] = 0
    if family == "gemma4_text":
        chosen["top_k_experts"] = chosen.pop("num_experts_per_tok")
        chosen["enable_moe_block"] = draw(st.booleans())
        if not chosen["enable_moe_block"]:
            chosen |= {"num_experts": None, "top_k_experts": None}
    if family == "gpt_oss":
        chosen["swiglu_limit"] = draw(st.sampled_from([0.5, 7.0]))
    if family in SHARED_WIDTH:
        chosen["shared_expert_intermediate_size"] = draw(st.integers(1, 24 // multiple)) * multiple
    if family in ("qwen3_moe", "qwen2_moe", "qwen3_next", "flint"):
        chosen["decoder_sparse_step"] = draw(st.sampled_from([1, 2]))
        chosen["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), max_size=1))
    if family in (*GROUPED, "deepseek_v2", "nemotron_h"):
        groups = draw(st.sampled_from([1, 2]))
        experts = 2 * groups * draw(st.integers(1, 2))  # of each group two experts are compared
        chosen |= {"n_group": groups, "topk_group": draw(st.integers(1, groups)), MIXTURES[family]: experts}
        chosen["num_experts_per_tok"] = draw(st.integers(1, experts * chosen["topk_group"] // groups))
    scales = {"hy_v3": "router_scaling_factor", "laguna": "moe_routed_scaling_factor", "afmoe": "route_scale"}
    scale = scales.get(family, "routed_scaling_factor")
    chosen[scale] = draw(st.sampled_from([1.0, 2.5]))
    if family in SHARED:
        chosen[SHARED[family]] = draw(st.integers(0 if family in ("ernie4_5_moe", "cohere2_moe") else 1, 2))
    if family in (
        "glm4_moe_lite",
        "mellum",
        "hy_v3",
        "laguna",
        "kimi_linear",
        "mimo_v2_flash",
        "cohere2_moe",
    ):
        kinds = st.sampled_from(["dense", "sparse"])
        chosen["mlp_layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    elif family == "afmoe":
        chosen |= dict(num_dense_layers=draw(st.integers(0, layers)), mup_enabled=draw(st.booleans()))
    elif family == "lfm2_moe":
        chosen |= dict(num_dense_layers=draw(st.integers(0, layers)), use_expert_bias=draw(st.booleans()))
    elif family in (*GROUPED, "deepseek_v2"):
        chosen["first_k_dense_replace"] = draw(st.integers(0, layers))
    if family == "cohere2_moe":
        chosen["rms_norm_eps"] = draw(st.sampled_from([None, 1e-6]))
        chosen["prefix_dense_intermediate_size"] = draw(st.integers(1, 24 // multiple)) * multiple
        chosen["expert_selection_fn"] = draw(st.sampled_from(["softmax", "sigmoid"]))
        chosen["shared_expert_combination_strategy"] = draw(st.sampled_from(["average", "sum"]))
    if family == "laguna":
        chosen["moe_router_logit_softcapping"] = draw(st.sampled_from([0.0, 2.0]))
    if family == "glm4_moe":
        chosen["use_qk_norm"] = draw(st.booleans())
    if family == "ernie4_5_moe":
        chosen["moe_layer_start_index"] = draw(st.integers(0, layers))
        chosen["moe_layer_end_index"] = draw(st.integers(-1, layers))
        chosen |= dict(
            moe_layer_interval=draw(st.integers(1, 2)), moe_norm_min=draw(st.sampled_from([1e-12, 0.5]))
        )
    if family == "deepseek_v2":
        chosen["topk_method"] = draw(st.sampled_from(["greedy", "group_limited_greedy"]))
    return chosen


def _latent(draw: st.DrawFn, family: str, multiple: int) -> dict[str, Any]:
    """The settings of a latent attention."""
    ranks = ("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim")
    chosen: dict[str, Any] = {name: draw(st.integers(1, 3)) * multiple for name in ranks}
    chosen["qk_rope_head_dim"] = draw(st.sampled_from([4, 8]))
    if family in MIXTURES:
        chosen["num_mtp_layers"] = 0
    if family in ("deepseek_v32", "glm_moe_dsa"):
        chosen |= dict(
            index_topk=draw(st.sampled_from([8, 64])), index_head_dim=draw(st.sampled_from([8, 16]))
        )
        chosen["index_n_heads"] = draw(st.integers(1, 3))
    elif family in MIXTURES and draw(st.booleans()):
        chosen["q_lora_rank"] = None
    return chosen


_FACTORS = st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=8, max_size=8)


@st.composite
def settings_of_models(
    draw: st.DrawFn, multiple: int = 4, families: Sequence[str] = tuple(BARE)
) -> dict[str, Any]:
    """The arguments of `small_model`: a family, a seed, a dtype, and settings of the config.

    multiple: the hidden size, the intermediate size and heads · head_dim are multiples of it.
    families: those of which one is drawn.
    """
    family = draw(st.sampled_from(families))
    if family in MIXTURES:  # grouped products want rows of whole 16 bytes
        multiple = math.lcm(multiple, 8)
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    # RoPE turns pairs; `dynamic` divides by head_dim - 2
    sizes_of_heads = (4, 8, 12, 16) if family in LINEAR_ATTENTION else (4, 6, 8, 12, 16)
    dims = [dim for dim in sizes_of_heads if heads * dim % multiple == 0]
    head_dim = draw(st.sampled_from(dims))
    step = math.lcm(multiple, heads) if family in DIVIDED else multiple
    sizes = st.integers(1, max(1, 48 // step)).map(lambda count: count * step)
    # Phi-3's config compares the factors of RoPE with hidden / heads; the others have no other head_dim
    own = st.just(heads * head_dim)
    hidden = draw(own if family in ("helium", *ONE_HEAD_DIM) else st.one_of(sizes, own))
    layers = draw(st.sampled_from([2, 1, 3]))
    chosen: dict[str, Any] = dict(
        family=family,
        seed=draw(st.integers(0, 2**16)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        hidden_size=hidden,
        intermediate_size=draw(st.integers(1, 48 // multiple)) * multiple,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=draw(st.integers(5, 80)),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        hidden_act=draw(st.sampled_from(["silu", "gelu_pytorch_tanh"])),
        tie_word_embeddings=draw(st.booleans()),
        pad_token_id=None,
        **_rope(draw, family, head_dim),
    )
    if hidden == heads * head_dim and draw(st.booleans()):  # head_dim is then hidden / heads
        if family in ("qwen2", "smollm3"):
            del chosen["head_dim"]
        elif family in ("llama", "exaone", "mistral", "seed_oss"):
            chosen["head_dim"] = None
    if family in ("granite", "granite_swa", *GRANITE, *ONE_HEAD_DIM) and hidden == heads * head_dim:
        del chosen["head_dim"]  # their published configs have none
    config = CONFIG_MAPPING[family]()
    for bias in ("attention_bias", "mlp_bias"):
        if hasattr(config, bias) and family != "jais2":  # which must have both
            chosen[bias] = draw(st.booleans())
    if family in (*LINEAR_ATTENTION, *CONVOLUTIONS, "kimi_linear"):
        other = CONVOLUTIONS.get(family, "linear_attention")
        types = [other, "full_attention"]  # both: the cache of full attention counts the tokens
        more = st.lists(st.sampled_from(types), min_size=max(layers - 2, 0), max_size=max(layers - 2, 0))
        chosen["layer_types"] = draw(st.permutations([*types, *draw(more)]))
        layers = chosen["num_hidden_layers"] = len(chosen["layer_types"])
    if family == "nemotron_h":
        kinds = ["linear_attention", "full_attention", "mlp", "moe"]
        more = draw(st.lists(st.sampled_from(kinds), max_size=layers - 1))
        chosen["layer_types"] = draw(st.permutations([*kinds[:2], draw(st.sampled_from(kinds[2:])), *more]))
        chosen["num_hidden_layers"] = len(chosen["layer_types"])
        chosen |= dict(mamba_num_heads=heads, n_groups=kv_heads, mamba_head_dim=4 * draw(st.integers(1, 3)))
        chosen |= dict(ssm_state_size=draw(st.integers(4, 8)), chunk_size=draw(st.sampled_from([4, 8])))
        chosen |= {f"{of}_bias": draw(st.booleans()) for of in ("use", "use_conv")}
        chosen["layer_norm_epsilon"] = chosen.pop("rms_norm_eps")
        chosen["mlp_hidden_act"] = draw(st.sampled_from(["relu2", chosen.pop("hidden_act")]))
        chosen["moe_shared_expert_intermediate_size"] = draw(st.integers(1, 24 // multiple)) * multiple
        chosen["tie_word_embeddings"] = False
        chosen["moe_latent_size"] = draw(st.sampled_from([None, multiple, 3 * multiple]))
    if family in LINEAR_ATTENTION:
        key_heads, more = draw(st.integers(1, 2)), draw(st.integers(1, 2))
        chosen |= dict(linear_num_key_heads=key_heads, linear_num_value_heads=key_heads * more)
        chosen |= {f"linear_{of}_head_dim": draw(st.sampled_from([8, 16])) for of in ("key", "value")}
        chosen["linear_conv_kernel_dim"] = draw(st.sampled_from([2, 4]))
    if family == "kimi_linear":
        chosen |= dict(
            linear_num_heads=draw(st.integers(1, 3)), linear_head_dim=draw(st.sampled_from([8, 16]))
        )
    if family in LATENT_ATTENTION:
        chosen |= _latent(draw, family, multiple) | dict(num_key_value_heads=heads)
        del chosen["head_dim"]
    if family == "mimo_v2_flash":
        chosen |= dict(v_head_dim=multiple * draw(st.integers(1, 3)), num_attention_heads=2 * heads)
        chosen["attention_value_scale"] = draw(st.sampled_from([0.6, 1.0]))
    if family == "minicpm3":
        chosen |= {name: draw(st.sampled_from([0.8, 3.0])) for name in ("scale_emb", "scale_depth")}
        chosen["dim_model_base"] = draw(st.sampled_from([4, 16]))
    if family == "opt":
        chosen |= dict(ffn_dim=chosen["intermediate_size"], num_key_value_heads=heads)
        chosen["activation_function"] = draw(st.sampled_from(["relu", "gelu"]))
    if family == "cohere":
        chosen["use_qk_norm"] = draw(st.booleans())
    if family in ("cohere", "cohere2", "cohere2_moe"):
        chosen |= dict(
            layer_norm_eps=chosen.pop("rms_norm_eps"), logit_scale=draw(st.sampled_from([0.06, 1.0]))
        )
    if family == "ernie4_5":
        chosen["use_bias"] = draw(st.booleans())
    if family == "seed_oss":
        chosen["attention_out_bias"] = draw(st.booleans())
    if family == "starcoder2":
        chosen["norm_epsilon"] = chosen["rms_norm_eps"]
    if family in ("apertus", "apertus1p5_text"):
        chosen["hidden_act"] = draw(st.sampled_from(["xielu", "silu"]))
    if family == "internlm3":
        chosen["mlp_bias"] = chosen["attention_bias"]
    if family == "laguna":
        of_layers = [kv_heads * draw(st.integers(1, 3)) for _ in range(layers)]
        chosen |= dict(num_attention_heads_per_layer=of_layers, gating=draw(st.sampled_from([True, "all"])))
    if family in ("lfm2", "lfm2_moe", "lfm3"):
        chosen |= dict(norm_eps=chosen.pop("rms_norm_eps"), conv_bias=draw(st.booleans()))
        del chosen["hidden_act"]  # it is always SiLU
    if family == "lfm2":
        chosen |= dict(block_auto_adjust_ff_dim=draw(st.booleans()), block_multiple_of=multiple)
        chosen["block_ffn_dim_multiplier"] = draw(st.sampled_from([0.9, 1.0, 1.7]))
    if family == "granitemoehybrid":
        chosen |= dict(mamba_n_heads=heads, mamba_n_groups=kv_heads, mamba_d_state=draw(st.integers(4, 8)))
        chosen["mamba_d_head"] = 2 * hidden // heads
        chosen |= {f"mamba_{part}_bias": draw(st.booleans()) for part in ("conv", "proj")}
        chosen["position_embedding_type"] = draw(st.sampled_from([None, "rope"]))
    if family in ("granite", "granite_swa", *GRANITE, "hyperclovax"):
        multipliers = ("residual", "embedding", "attention")
        chosen |= {f"{of}_multiplier": draw(st.sampled_from([0.22, 1.0, 3.0])) for of in multipliers}
        chosen["logits_scaling"] = draw(st.sampled_from([1.0, 16.0]))
    # with 3 times the scores, fp32 rounds the logits by 1e-5
    if family in ("granite_swa", *GRANITE, "hyperclovax"):
        chosen["attention_multiplier"] = draw(st.sampled_from([0.22, 1.0]))
    if family in MIXTURES:
        chosen |= _mixture(draw, family, multiple, layers)
    if family in ("gemma2", "gemma3_text", "vaultgemma"):
        chosen["query_pre_attn_scalar"] = draw(st.sampled_from([4, 256]))
    if family in ("gemma2", "gemma3_text", "vaultgemma", *GEMMA4):
        chosen["hidden_activation"] = chosen.pop("hidden_act")
        chosen["final_logit_softcapping"] = draw(st.sampled_from([None, 2.0, 30.0]))
    if family in GEMMA4:
        chosen["global_head_dim"] = draw(st.sampled_from(dims))
        chosen["attention_k_eq_v"] = draw(st.booleans())
        chosen["num_global_key_value_heads"] = draw(st.sampled_from([None, 1, heads]))
        if family == "gemma4_text":
            chosen |= dict(hidden_size_per_layer_input=draw(st.sampled_from([0, 4])))
            chosen |= dict(vocab_size_per_layer_input=96, use_double_wide_mlp=draw(st.booleans()))
    if family in ("gemma2", "vaultgemma"):
        chosen["attn_logit_softcapping"] = draw(st.sampled_from([None, 2.0, 50.0]))
    window = draw(st.sampled_from([3, 10] if family == "gpt_oss" else [None, 3, 10]))
    if family in SLIDING:
        types = st.sampled_from(["sliding_attention", "full_attention"])
        chosen["layer_types"] = draw(st.lists(types, min_size=layers, max_size=layers))
        chosen["sliding_window"] = window or 5
    if chosen.get("hidden_size_per_layer_input"):  # a layer of each type comes before those that borrow keys
        types = [*chosen["layer_types"][:-1], "full_attention"]
        possible = [n for n in range(layers) if {*types} == {*types[: layers - n]}]
        chosen |= dict(layer_types=types, num_kv_shared_layers=draw(st.sampled_from(possible)))
    if family in ("mistral", "ministral3", "mixtral", "phi3", "gpt_oss", "starcoder2"):
        chosen["sliding_window"] = window
    if family == "dots1":
        chosen |= dict(sliding_window=window, max_window_layers=draw(st.integers(0, layers)))
    if family in ("qwen2", "qwen3") and window:
        chosen |= dict(use_sliding_window=True, sliding_window=window)
        chosen["max_window_layers"] = draw(st.integers(0, layers))
    return chosen


def build(settings: dict[str, Any]) -> nn.Module:
    """The model of `settings_of_models`."""
    return small_model(**settings)


def tokens_for(
    settings: dict[str, Any], rows: int = 2, length: int = ORIGINAL_POSITIONS, seed: int = 0
) -> torch.Tensor:
    """Token ids [rows, length] in the model's vocabulary."""
    return random_tokens(rows, length, seed=seed, vocab=settings["vocab_size"])
