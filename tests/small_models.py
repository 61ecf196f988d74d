"""Small random models of every supported family, with values that reveal mistakes: grouped-query attention,
heads · head_dim other than the hidden size, norm weights other than 1, biases other than 0."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from drot.model.decoder import DecoderModel
from drot.model.rotation import Bases, LayerRotation
from drot.pipeline.invariance import random_rotation

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
}


@torch.no_grad()
def small_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    """A random model of a family in FAMILIES, in eval mode."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.partition("-")[0], **(COMMON | FAMILIES[family] | changes))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.3)
        else:
            parameter.normal_(0, 0.15)
    for parameter in model.parameters():  # model.to(dtype) would round the buffers of RoPE too
        parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)


def random_rotations(model: nn.Module, seed: int = 1) -> list[LayerRotation]:
    """A random rotation of each layer, in fp64."""
    handle, generator = DecoderModel(model), torch.Generator().manual_seed(seed)
    return [random_rotation(handle.hidden_size, handle.heads, generator) for _ in handle.layers]


def rotate_model(
    model: nn.Module, rotations: list[LayerRotation] | None = None, place: str | None = "input"
) -> list[LayerRotation]:
    """Merges rotations into a model, as a run does, and returns them. None draws random rotations."""
    rotations = rotations or random_rotations(model)
    handle, bases = DecoderModel(model), Bases(place, len(rotations))
    for layer, rotation in zip(handle.layers, rotations, strict=True):
        layer.rotate(rotation, bases.held(layer.index, rotations) if place == "residual" else None)
    handle.rotate_ends(rotations[0].r1, rotations[-1].r1)
    if place == "input":
        for layer in handle.layers[1:]:
            layer.hold(bases.held(layer.index, rotations))
    return rotations


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
