"""Small random models of every supported family, with values that reveal mistakes: grouped-query attention,
heads · head_dim other than the hidden size, norm weights other than 1, biases other than 0."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_families import COMMON, FAMILIES
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
from drot.model.multimodal import language_config
from drot.model.rotation import Bases, LayerRotation, around_ones
from drot.model.sizes import HeadShape

#: mixtures of experts
MIXTURES = [
    name
    for name, settings in FAMILIES.items()
    if DECLARED[name.partition("-")[0]].experts is not None and any("expert" in key for key in settings)
    if settings.get("num_local_experts") != 0
]
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
    config = language_config(AutoConfig.for_model(family.partition("-")[0], **settings))
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
    difference = found.detach().double() - expected.detach().double()
    return float(difference.norm() / expected.detach().double().norm())
