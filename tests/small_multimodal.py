"""Small random models that read images too, and an input of theirs with an image."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from small_models import is_available, letter_tokenizer, random_tokens, small_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from drot.model.families import FAMILIES

PIXTRAL = dict(model_type="pixtral", image_size=56, patch_size=14, hidden_size=16, intermediate_size=16)
PIXTRAL |= dict(num_hidden_layers=1, num_attention_heads=2, head_dim=8)
SIGLIP = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
SIGLIP |= dict(image_size=28, patch_size=14)
QWEN = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4)
GEMMA4 = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
GEMMA4 |= dict(num_key_value_heads=2, pooling_kernel_size=2, patch_size=4, position_embedding_size=8)
AUDIO = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16)
AUDIO |= dict(subsampling_conv_channels=[4, 4])
UNIFIED = dict(patch_size=4, pooling_kernel_size=1, mm_embed_dim=16, mm_posemb_size=8, output_proj_dims=16)
GLM = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32, patch_size=4)
GLM |= dict(image_size=8)
CLIP = dict(model_type="clip_vision_model", image_size=4, patch_size=4, hidden_size=16, intermediate_size=16)
CLIP |= dict(num_hidden_layers=1, num_attention_heads=2)
TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
SMALL_IMAGE = dict(image_size=8, patch_size=4)
#: the token that stands for a part of an image
IMAGE = 95
TOKENS_OF_GEMMA4 = dict(image_token_id=IMAGE, video_token_id=94, audio_token_id=93)
WITH_POSITIONS = dict(vision_config=QWEN | dict(num_position_embeddings=16), image_token_id=IMAGE)
IN_LAYERS = dict(depth=2, num_position_embeddings=16, deepstack_visual_indexes=[0, 1])
DEEPSTACK = dict(vision_config=QWEN | IN_LAYERS, image_token_id=IMAGE)
#: model that reads images → its language model in small_models, and the entries of its config
MULTIMODAL_MODELS = {
    "mistral3": ("ministral3", dict(vision_config=PIXTRAL, image_token_index=IMAGE)),
    "internvl": (
        "qwen3",
        dict(
            vision_config=TOWER | dict(image_size=[8, 8], patch_size=[4, 4]),
            image_token_id=IMAGE,
            downsample_ratio=0.5,
        ),
    ),
    "lfm2_vl": (
        "lfm2",
        dict(
            vision_config=TOWER | dict(num_patches=16, patch_size=4),
            image_token_id=IMAGE,
            projector_hidden_size=24,
            downsample_factor=2,
        ),
    ),
    "lfm3_vl": (
        "lfm3",
        dict(
            vision_config=TOWER | dict(num_key_value_heads=2, patch_size=4),
            image_token_id=IMAGE,
            video_token_id=94,
            projector_hidden_size=24,
        ),
    ),
    "llava": ("llama", dict(vision_config=CLIP, image_token_index=IMAGE, vision_feature_layer=-1)),
    "apertus1p5": (
        "apertus1p5_text",
        dict(
            vision_config=dict(codebook_size=16, embed_dim=8, latent_channels=8, base_channels=32)
            | dict(channel_multiplier=[1, 1], num_res_blocks=1, attn_resolutions=[], resolution=4),
            audio_config=dict(num_filters=4, hidden_size=8, codebook_size=16, codebook_dim=8)
            | dict(model_type="wavtokenizer_encoder", num_lstm_layers=1),
            image_token_id=IMAGE,
            audio_token_id=94,
            image_token_offset=60,
            audio_token_offset=76,
        ),
    ),
    "aya_vision": (
        "cohere2",
        dict(vision_config=SIGLIP | dict(model_type="siglip_vision_model"), image_token_index=IMAGE),
    ),
    "cohere2_vision": (
        "cohere2",
        dict(
            vision_config=SIGLIP | dict(model_type="siglip_vision_model"),
            image_token_id=IMAGE,
            alignment_intermediate_size=24,
        ),
    ),
    "lighton_ocr": ("qwen3", dict(vision_config=PIXTRAL, image_token_id=IMAGE)),
    "idefics3": ("llama", dict(vision_config=TOWER | SMALL_IMAGE, image_token_id=IMAGE)),
    "smolvlm": ("llama", dict(vision_config=TOWER | SMALL_IMAGE, image_token_id=IMAGE)),
    "exaone4_5": (
        "exaone4",
        dict(vision_config=QWEN | dict(num_key_value_heads=2, window_size=8), image_token_id=IMAGE),
    ),
    "qwen2_vl": (
        "qwen2",
        dict(
            vision_config=dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4),
            image_token_id=IMAGE,
        ),
    ),
    "glm4v": ("glm4", dict(vision_config=GLM, image_token_id=IMAGE)),
    "glm4v_moe": ("glm4_moe", dict(vision_config=GLM, image_token_id=IMAGE)),
    "mistral3-experts": ("mistral4", dict(vision_config=PIXTRAL, image_token_index=IMAGE)),
    "gemma3": (
        "gemma3_text",
        dict(vision_config=SIGLIP, mm_tokens_per_image=1, image_token_index=IMAGE, image_token_id=IMAGE),
    ),
    "gemma4": ("gemma4_text-experts", dict(vision_config=GEMMA4, **TOKENS_OF_GEMMA4)),
    "gemma4-lends": (  # which reads sounds too
        "gemma4_text-lends",
        dict(vision_config=GEMMA4, audio_config=AUDIO, **TOKENS_OF_GEMMA4),
    ),
    "gemma4_unified": ("gemma4_unified_text", dict(vision_config=UNIFIED, **TOKENS_OF_GEMMA4)),
    "qwen2_5_vl": ("qwen2", dict(vision_config=QWEN, image_token_id=IMAGE)),
    "qwen3_vl": ("qwen3", DEEPSTACK),
    "qwen3_vl_moe": ("qwen3_moe", DEEPSTACK),
    "qwen3_5": ("qwen3_5_text", WITH_POSITIONS),
    "qwen3_5_moe": ("qwen3_5_moe_text", WITH_POSITIONS),
}


#: those that transformers has
AVAILABLE = [
    name
    for name, (text, _) in MULTIMODAL_MODELS.items()
    if is_available(text) and name.partition("-")[0] in CONFIG_MAPPING
]


#: those whose files differ in kind: names, projectors, forms of experts, keys of other layers, or tokens for
#: images; the others are read as one of these
KINDS = [
    name
    for name in AVAILABLE
    if name in ("apertus1p5", "gemma3", "gemma4", "gemma4-lends", "glm4v_moe", "llava", "mistral3")
    or name in ("mistral3-experts", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm")
]


def rotations_of(model_type: str) -> dict[str, Any]:
    """Settings of a recipe for a model whose layers may take no R3."""
    family = FAMILIES[MULTIMODAL_MODELS[model_type][0].partition("-")[0]]
    return {} if family.takes("r3") else {"down_rotation": "none"}


def small_multimodal(model_type: str, **changes: Any) -> Any:
    """A random model that reads images too. changes: of the config of its language model."""
    text_type, entries = MULTIMODAL_MODELS[model_type]
    text = small_model(text_type).config.to_dict() | changes
    if model_type == "glm4v_moe":
        text["use_qk_norm"] = False  # it has none
    if model_type in ("qwen3_5_moe", "qwen3_vl_moe", "mistral3-experts", "glm4v_moe"):
        width = 16 if model_type == "qwen3_5_moe" else 48  # which blocks of 16 divide
        text["moe_intermediate_size"] = changes.get("moe_intermediate_size", width)
    if text_type == "cohere2":
        text["logit_scale"] = 1.0  # transformers scales no logits of these models
    if model_type == "gemma3":
        del text["final_logit_softcapping"]  # with images it has none
    if model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe"):
        text |= {"model_type": f"{model_type}_text"}
        sections = [2, 3, 3] if model_type.startswith("qwen3") else [1, 1, 2]  # half of a head
        sections = [size * changes.get("head_dim", 16) // 16 for size in sections]
        rope = changes.get("rope_parameters", {"rope_type": "default"})
        if model_type.startswith("glm"):
            rope = rope | {"partial_rotary_factor": 0.5}
        if model_type == "glm4v":
            sections, text["head_dim"] = [0, 1, 1], text["hidden_size"] // text["num_attention_heads"]
        text["rope_parameters"] = {"rope_theta": 1e4, "mrope_section": sections} | rope
    if "out_hidden_size" in (vision := entries.get("vision_config", {})):
        entries = entries | {"vision_config": vision | {"out_hidden_size": text["hidden_size"]}}
    tied = bool(text.get("tie_word_embeddings"))
    config = AutoConfig.for_model(
        model_type.partition("-")[0], text_config=text, tie_word_embeddings=tied, **entries
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for name, parameter in model.named_parameters():  # norms of 1, biases of 0 and weak images hide mistakes
        spread = 0.02 if "embed_tokens" in name or "lm_head" in name else 0.15
        parameter.data = torch.randn_like(parameter) * spread + (parameter.dim() == 1 and "norm" in name)
    return model


def save_small_multimodal(folder: Path, model_type: str, **changes: Any) -> Path:
    """Writes a random model that reads images too to `folder`, with a tokenizer and a file of a processor."""
    model = small_multimodal(model_type, **changes)
    model.save_pretrained(folder)
    if model_type in ("qwen3_5_moe", "qwen3_vl_moe"):
        hold_experts_together(folder, model, swapped=model_type == "qwen3_vl_moe")
    letter_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 28}\n')
    return folder


def hold_experts_together(folder: Path, model: Any, *, swapped: bool = False) -> None:
    """Rewrites the weights in `folder` as they are published: the experts of a layer lie in one tensor.

    swapped: as [experts, in, out].
    """
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: each for name, each in tensors.items() if ".mlp.experts." not in name}
    for name, each in model.state_dict().items():
        if ".mlp.experts." in name:
            tensors[name] = each.mT.contiguous() if swapped else each
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def image_and_text(model_type: str) -> dict[str, torch.Tensor]:
    """An input with an image of one or two tokens, with random pixels, between random tokens."""
    tokens = random_tokens(1, 20, vocab=90)
    tokens[0, 5] = IMAGE
    random = torch.Generator().manual_seed(3)
    sizes = {"gemma3": 28, "internvl": 8, "llava": 4, "aya_vision": 28, "cohere2_vision": 28}
    if model_type in sizes:
        pixels = torch.randn(1, 3, sizes[model_type], sizes[model_type], generator=random)
        return {"input_ids": tokens, "pixel_values": pixels}
    if model_type == "apertus1p5":
        tokens[0, 5:9] = IMAGE
        pixels = torch.randn(1, 3, 4, 4, generator=random)
        return {"input_ids": tokens, "pixel_values": pixels, "image_sizes": torch.tensor([[4, 4]])}
    if model_type in ("idefics3", "smolvlm"):
        return {"input_ids": tokens, "pixel_values": torch.randn(1, 1, 3, 8, 8, generator=random)}
    if model_type == "lfm2_vl":
        return {
            "input_ids": tokens,
            "pixel_values": torch.randn(1, 4, 3 * 4 * 4, generator=random),
            "pixel_attention_mask": torch.ones(1, 4, dtype=torch.int),
            "spatial_shapes": torch.tensor([[2, 2]]),
        }
    if model_type.startswith("gemma4"):  # 2 × 2 patches become one token; or one patch is one
        patches = 1 if model_type == "gemma4_unified" else 4
        pixels = torch.randn(1, patches, 3 * 4 * 4, generator=random)
        places = torch.tensor([[[0, 0], [1, 0], [0, 1], [1, 1]]])[:, :patches]
        kinds = (tokens == IMAGE).int()
        return {
            "input_ids": tokens,
            "pixel_values": pixels,
            "image_position_ids": places,
            "mm_token_type_ids": kinds,
        }
    if model_type.startswith(("mistral3", "lighton_ocr")):  # it fails on an image of one token
        tokens[0, 6] = IMAGE
        pixels = torch.randn(1, 3, 56, 28, generator=random)
        return {"input_ids": tokens, "pixel_values": pixels, "image_sizes": torch.tensor([[56, 28]])}
    pixels = torch.randn(4, 3 * 2 * 4 * 4, generator=random)  # 2 × 2 patches of 2 frames become one token
    grid = torch.tensor([[1, 2, 2]])
    return {
        "input_ids": tokens,
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }
