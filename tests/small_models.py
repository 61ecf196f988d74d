"""Small random models of every supported family, with values that reveal mistakes: grouped-query attention,
heads · head_dim other than the hidden size, norm weights other than 1, biases other than 0."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    core_model_loading,
)

from drot.calibration.stream import CalibrationStream
from drot.model.decoder import DecoderModel
from drot.model.families import FAMILIES as DECLARED
from drot.model.layer import DecoderLayer
from drot.model.rotation import Bases, LayerRotation, around_ones
from drot.model.sizes import HeadShape

COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=1,
)
#: the last layer attends to all tokens, the others to the last ones
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
#: the second layer has keys and values, the others a state
LINEAR_ATTENTION = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    pad_token_id=2,
)
#: queries, keys and values come from latents
LATENT_ATTENTION = dict(
    kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=20, num_key_value_heads=4
)
FAMILIES: dict[str, dict] = {
    "llama": dict(head_dim=12, tie_word_embeddings=True),
    "llama-biased": dict(head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "mistral": dict(head_dim=12, sliding_window=16, tie_word_embeddings=False),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen2-sliding": dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": dict(head_dim=16, tie_word_embeddings=True),
    "qwen3-biased": dict(head_dim=16, attention_bias=True, tie_word_embeddings=False),
    "smollm3": dict(head_dim=12, no_rope_layer_interval=2, pad_token_id=2, tie_word_embeddings=True),
    "smollm3-biased": dict(
        head_dim=16,
        no_rope_layers=[0, 1, 0],
        pad_token_id=2,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "ministral3": dict(
        head_dim=12,
        sliding_window=16,
        pad_token_id=2,
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=8.0,
            original_max_position_embeddings=16,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "seed_oss": dict(
        head_dim=12, attention_out_bias=True, mlp_bias=True, pad_token_id=2, tie_word_embeddings=False
    ),
    "ernie4_5": dict(head_dim=12, pad_token_id=2, tie_word_embeddings=True),
    "ernie4_5-biased": dict(head_dim=16, use_bias=True, pad_token_id=2, tie_word_embeddings=False),
    "hunyuan_v1_dense": dict(
        head_dim=12,
        attention_bias=True,
        pad_token_id=2,
        eod_token_id=3,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=1.0, alpha=10.0),
    ),
    "cwm": dict(
        head_dim=12,
        sliding_window=8,
        layer_types=LAYER_TYPES,
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=1e4,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "gemma": dict(head_dim=12, attention_bias=True, pad_token_id=2, tie_word_embeddings=True),
    "granite": dict(
        residual_multiplier=0.22,
        embedding_multiplier=12.0,
        attention_multiplier=0.3,
        logits_scaling=8.0,
        tie_word_embeddings=True,
    ),
    "granite-biased": dict(
        head_dim=12,
        residual_multiplier=1.7,
        embedding_multiplier=3.0,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "qwen3_moe": dict(
        head_dim=12,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
    "mixtral": dict(
        head_dim=12, num_local_experts=3, num_experts_per_tok=2, sliding_window=16, tie_word_embeddings=False
    ),
    "glm": dict(head_dim=12, partial_rotary_factor=0.5, pad_token_id=2, tie_word_embeddings=True),
    "glm4": dict(head_dim=12, partial_rotary_factor=0.5, pad_token_id=2, tie_word_embeddings=False),
    "glm4-biased": dict(head_dim=16, attention_bias=True, pad_token_id=2, tie_word_embeddings=True),
    "olmo2": dict(head_dim=12, pad_token_id=2, tie_word_embeddings=False),
    "olmo2-biased": dict(attention_bias=True, pad_token_id=2, tie_word_embeddings=True),
    "olmo3": dict(sliding_window=8, layer_types=LAYER_TYPES, pad_token_id=2, tie_word_embeddings=False),
    "exaone4": dict(
        head_dim=12, sliding_window=8, layer_types=LAYER_TYPES, pad_token_id=2, tie_word_embeddings=True
    ),
    "gemma2": dict(
        head_dim=12,
        sliding_window=8,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        pad_token_id=2,
    ),
    "gemma2-biased": dict(
        head_dim=16,
        attention_bias=True,
        final_logit_softcapping=None,
        pad_token_id=2,
        tie_word_embeddings=False,
    ),
    "gemma3_text": dict(
        head_dim=12,
        sliding_window=8,
        layer_types=LAYER_TYPES,
        query_pre_attn_scalar=20,
        final_logit_softcapping=3.0,
        pad_token_id=2,
    ),
    "gemma4_text": dict(
        head_dim=12,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        final_logit_softcapping=3.0,
        pad_token_id=2,
    ),
    "gemma4_text-values": dict(
        head_dim=16,
        global_head_dim=8,
        attention_bias=True,
        hidden_size_per_layer_input=0,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        pad_token_id=2,
        tie_word_embeddings=False,
    ),
    "gemma4_unified_text": dict(
        head_dim=12,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=8,
        layer_types=LAYER_TYPES,
        final_logit_softcapping=3.0,
        pad_token_id=2,
    ),
    "qwen2_moe": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "qwen3_next": dict(
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[0],
        **LINEAR_ATTENTION,
    ),
    "qwen3_5_text": dict(head_dim=16, tie_word_embeddings=True, **LINEAR_ATTENTION),
    "qwen3_5_moe_text": dict(
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=16,
        **LINEAR_ATTENTION,
    ),
    "glm4_moe": dict(
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.7,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
    ),
    "youtu": dict(q_lora_rank=24, attention_bias=True, tie_word_embeddings=True, **LATENT_ATTENTION),
    "minicpm3": dict(
        attention_bias=True,
        mlp_bias=True,
        scale_emb=3.0,
        scale_depth=0.8,
        dim_model_base=8,
        q_lora_rank=24,
        tie_word_embeddings=False,
        **LATENT_ATTENTION,
    ),
    "deepseek_v3": dict(
        **LATENT_ATTENTION,
        q_lora_rank=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        n_shared_experts=2,
        first_k_dense_replace=1,
        attention_bias=True,
        num_mtp_layers=0,
    ),
    "granitemoe": dict(
        head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        residual_multiplier=0.6,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        logits_scaling=2.0,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "minimax_m2": dict(
        head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
        tie_word_embeddings=False,
    ),
    "glm4_moe_lite": dict(
        **LATENT_ATTENTION,
        q_lora_rank=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        n_shared_experts=2,
        routed_scaling_factor=1.7,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "olmoe": dict(
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        attention_bias=True,
        pad_token_id=2,
        tie_word_embeddings=False,
    ),
    "ernie4_5_moe": dict(
        head_dim=12,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=24,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_norm_min=0.4,
        tie_word_embeddings=True,
    ),
    "deepseek_v2": dict(  # its queries have no latent
        **LATENT_ATTENTION,
        q_lora_rank=None,
        n_routed_experts=4,
        num_experts_per_tok=2,
        topk_method="group_limited_greedy",
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.7,
        tie_word_embeddings=False,
    ),
    "deepseek_v2-biased": dict(
        **LATENT_ATTENTION,
        q_lora_rank=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        first_k_dense_replace=1,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "dots1": dict(
        head_dim=12,
        sliding_window=8,
        max_window_layers=2,
        attention_bias=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        n_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.7,
        tie_word_embeddings=False,
    ),
    "solar_open": dict(
        head_dim=12,
        attention_bias=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        n_shared_experts=2,
        routed_scaling_factor=1.7,
        tie_word_embeddings=False,
    ),
    "exaone_moe": dict(
        head_dim=12,
        sliding_window=8,
        layer_types=LAYER_TYPES,
        num_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        num_shared_experts=2,
        first_k_dense_replace=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    ),
    "hy_v3": dict(
        head_dim=12,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        num_shared_experts=2,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "mellum": dict(
        head_dim=12,
        sliding_window=8,
        layer_types=LAYER_TYPES,
        mlp_layer_types=["sparse", "dense", "sparse"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "deepseek_v32": dict(
        **LATENT_ATTENTION,
        q_lora_rank=24,
        index_topk=6,
        index_n_heads=2,
        index_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        n_shared_experts=2,
        first_k_dense_replace=1,
        attention_bias=True,
    ),
    "gpt_oss": dict(
        head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        swiglu_limit=1.5,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, truncate=False, original_max_position_embeddings=32
        ),
        tie_word_embeddings=False,
    ),
    "cohere": dict(use_qk_norm=True, logit_scale=0.4, pad_token_id=2),
    "cohere-biased": dict(attention_bias=True, logit_scale=3.0, pad_token_id=2, tie_word_embeddings=False),
    "cohere2": dict(sliding_window=8, layer_types=LAYER_TYPES, logit_scale=0.4, pad_token_id=2),
    "opt": dict(ffn_dim=48, num_key_value_heads=4, pad_token_id=2, tie_word_embeddings=True),
    "starcoder2": dict(sliding_window=8, pad_token_id=2, tie_word_embeddings=True),
    "arcee": dict(head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "apertus": dict(
        head_dim=12,
        attention_bias=True,
        pad_token_id=2,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
    "phi3": dict(pad_token_id=2, tie_word_embeddings=False),
    "phi3-longrope": dict(
        sliding_window=10,
        pad_token_id=2,
        original_max_position_embeddings=16,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=1e4,
            partial_rotary_factor=0.5,
            short_factor=[1.0, 1.5],
            long_factor=[2.0, 4.0],
            original_max_position_embeddings=16,
        ),
        tie_word_embeddings=True,
    ),
}
#: mixtures of experts
MIXTURES = [name for name in FAMILIES if DECLARED[name.partition("-")[0]].experts is not None]
#: those whose MLP takes R3 and that have no experts: they take fine-tuning and artifacts too
WITHOUT_EXPERTS = [
    name for name in FAMILIES if DECLARED[name.partition("-")[0]].takes("r3") and name not in MIXTURES
]
#: those whose residual stream R1 cannot rotate
INSIDE = [name for name in FAMILIES if not DECLARED[name.partition("-")[0]].rotates_stream]


def is_available(family: str) -> bool:
    """Whether transformers is new enough for a family."""
    model_type = family.partition("-")[0]
    needs = DECLARED[model_type].needs
    return model_type in CONFIG_MAPPING and (needs is None or hasattr(core_model_loading, needs))


@torch.no_grad()
def small_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    """A random model of a family in FAMILIES, in eval mode. Skips a test whose transformers is too old."""
    if not is_available(family):
        pytest.skip("needs a newer transformers")
    torch.manual_seed(seed)
    settings = COMMON | FAMILIES[family] | changes
    for types in ("layer_types", "mlp_layer_types"):  # a config with other layers than their types is refused
        if settings.get(types):
            settings[types] = settings[types][-settings["num_hidden_layers"] :]
    config = AutoConfig.for_model(family.partition("-")[0], **settings)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.3)
        else:
            parameter.normal_(0, 0.15)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):  # of a router
            buffer.normal_(0, 0.1)
        elif name.endswith("layer_scalar"):
            buffer.data = buffer.uniform_(0.5, 1.5).to(dtype)
    for parameter in model.parameters():  # model.to(dtype) would round the buffers of RoPE too
        parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)


def random_rotation(
    d: int,
    shape: HeadShape,
    generator: torch.Generator,
    *,
    down: tuple[int, int] | None = None,
    keeps_ones: bool = False,
) -> LayerRotation:
    """QR factors of Gaussian matrices, in fp64.

    down: number and size of the blocks of R3; None without R3.
    keeps_ones: whether R1 1 = 1, as a family with LayerNorm needs.
    """

    def draw(*size: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(*size, generator=generator, dtype=torch.float64))[0]

    if keeps_ones:
        r1 = around_ones(torch.block_diag(torch.ones(1, 1, dtype=torch.float64), draw(d - 1, d - 1)))
    else:
        r1 = draw(d, d)
    r2 = draw(shape.kv_heads, shape.head_dim, shape.head_dim)
    return LayerRotation(r1, r2, draw(*down, down[-1]) if down else None)


def random_rotations(model: nn.Module, seed: int = 1, down_block: int | None = None) -> list[LayerRotation]:
    """A random rotation of each layer, in fp64, with an R3 of blocks of `down_block`."""
    handle, generator = DecoderModel(model), torch.Generator().manual_seed(seed)
    options, found = dict(keeps_ones=handle.family.layer_norm), []
    for layer in handle.layers:
        down = None if down_block is None else (layer.down_inputs() // down_block, down_block)
        found.append(random_rotation(handle.hidden_size, layer.heads, generator, down=down, **options))
    return found


def place_in(model: DecoderModel, place: str | None) -> str | None:
    """`place`, or where R1 acts instead in a family whose stream cannot rotate."""
    return place if place is None or model.family.rotates_stream else "inside"


def rotate_model(
    model: nn.Module,
    rotations: list[LayerRotation] | None = None,
    place: str | None = "input",
    dtype: torch.dtype = torch.float64,
) -> list[LayerRotation]:
    """Merges rotations into a model, as a run does, and returns them. None draws random rotations."""
    rotations, handle = rotations or random_rotations(model), DecoderModel(model)
    place = place_in(handle, place)
    if not handle.family.rotates_stream:  # one R1 for all layers is then none
        eye = torch.eye(handle.hidden_size, dtype=torch.float64)
        rotations = rotations if place else [replace(rotation, r1=eye) for rotation in rotations]
    bases = Bases(place, len(rotations))
    for layer, rotation in zip(handle.layers, rotations, strict=True):
        layer.rotate(rotation, bases.merged(layer.index, rotations), dtype=dtype)
    if handle.family.rotates_stream:
        handle.rotate_ends(rotations[0].r1, rotations[-1].r1, torch.device("cpu"))
    if place == "input":
        for layer in handle.layers[1:]:
            layer.hold(bases.held(layer.index, rotations))
    return rotations


def layer_outputs(stream: CalibrationStream, layer: DecoderLayer) -> torch.Tensor:
    """The outputs of a layer on a stream, which is not changed."""
    copy = stream.copy()
    copy.advance(layer)
    return copy.hidden_states


def random_tokens(rows: int, length: int, seed: int = 0, vocab: int = COMMON["vocab_size"]) -> torch.Tensor:
    """Random token ids [rows, length]."""
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for the small models: one token for each printable ASCII character."""
    letters = {chr(32 + i): i for i in range(COMMON["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(letters, unk_token=" "))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\x7f", pad_token="\x7f")


def save_small_model(model: nn.Module, folder: Path) -> Path:
    """Writes a small model and its tokenizer to `folder`."""
    model.save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


def random_text(length: int, seed: int = 0) -> str:
    """Random letters, of which `letter_tokenizer` makes one token each."""
    return "".join(chr(32 + i) for i in random_tokens(1, length, seed=seed, vocab=95)[0].tolist())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found - expected‖ / ‖expected‖, in fp64."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
