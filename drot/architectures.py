"""What a decoder-only model is made of, as data: one entry a model family.

Everything else in drot asks this table where a weight lies and never guesses; adding a family is
adding an entry here and its name to the test that checks invariance on a small random model.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from drot.errors import UserError

#: the seven linears of a decoder layer, in the order in which they are pruned
ROLES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: the linears that read the same input, and so share one Hessian
INPUT_GROUPS = {
    "attention": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "mlp": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Attention geometry; heads · head_dim need not equal the hidden size."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Dotted paths into a Hugging Face model.

    `linears`, the two blocks and the norm in front of each are relative to a decoder layer.
    norm_offset is what the norm adds to its stored weight before it multiplies (0 in LLaMA, 1 in Gemma).
    """

    model_type: str
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    linears: tuple[tuple[str, str], ...] = (
        ("q_proj", "self_attn.q_proj"),
        ("k_proj", "self_attn.k_proj"),
        ("v_proj", "self_attn.v_proj"),
        ("o_proj", "self_attn.o_proj"),
        ("gate_proj", "mlp.gate_proj"),
        ("up_proj", "mlp.up_proj"),
        ("down_proj", "mlp.down_proj"),
    )
    norm_offset: float = 0.0


#: Per-head q/k norms (Qwen3) act behind q_proj and k_proj, where nothing is rotated; biases of any
#: linear are carried along by `surgery`. So these families differ in their model type alone.
ARCHITECTURES = {name: Architecture(model_type=name) for name in ("llama", "mistral", "qwen2", "qwen3")}


def architecture_of(config: Any) -> Architecture:
    """The entry of a model's `config`.

    Raises UserError, naming the model type, for a family that is not in the table.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"model type {model_type!r} is not supported: expected one of {', '.join(ARCHITECTURES)}; "
            "a new family is an entry in drot/architectures.py"
        )
    return ARCHITECTURES[model_type]


def quantization_of(config: Any) -> dict[str, Any]:
    """What a model's `config` says of how its weights are stored; {} where they are plain."""
    said = getattr(config, "quantization_config", None) or {}
    return said if isinstance(said, dict) else dict(said.to_dict())


def head_shape(config: Any) -> HeadShape:
    """Attention geometry from a model's `config`."""
    heads = config.num_attention_heads
    return HeadShape(
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def module_at(root: nn.Module, path: str) -> Any:
    """The submodule at a dotted path. Raises UserError naming the path where there is none."""
    try:
        return attrgetter(path)(root)
    except AttributeError:
        raise UserError(
            f"{type(root).__name__} has no module {path!r}, which its model type promises: the model "
            "was changed after loading, or drot/architectures.py describes another version of it"
        ) from None


def decoder_layers(model: nn.Module, arch: Architecture) -> nn.ModuleList:
    """The list of decoder layers."""
    layers = module_at(model, arch.layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def layer_linears(layer: nn.Module, arch: Architecture) -> dict[str, nn.Linear]:
    """Role → linear of one decoder layer. Raises UserError where one is not a plain nn.Linear."""
    found = {}
    for role, path in arch.linears:
        linear = module_at(layer, path)
        if not isinstance(linear, nn.Linear):
            raise UserError(
                f"{path} must be a plain torch.nn.Linear, got {type(linear).__name__}: "
                "load the model unquantised, without adapters"
            )
        found[role] = linear
    return found


def validate_model(model: PreTrainedModel, arch: Architecture) -> None:
    """Checks every path, type and shape of the table against the model, before work begins.

    Raises UserError that names the first module which differs.
    """
    config = model.config
    shape, d = head_shape(config), config.hidden_size
    for path in (arch.embedding, arch.final_norm, arch.lm_head):
        module_at(model, path)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ff = config.intermediate_size
    expected = {
        "q_proj": (q, d),
        "k_proj": (kv, d),
        "v_proj": (kv, d),
        "o_proj": (d, q),
        "gate_proj": (ff, d),
        "up_proj": (ff, d),
        "down_proj": (d, ff),
    }
    for index, layer in enumerate(decoder_layers(model, arch)):
        for path in (arch.attention_norm, arch.mlp_norm):
            if getattr(module_at(layer, path), "bias", None) is not None:
                raise UserError(f"layer {index}: {path} has a bias; only RMSNorm can be folded")
        for role, linear in layer_linears(layer, arch).items():
            if tuple(linear.weight.shape) != expected[role]:
                raise UserError(
                    f"layer {index}: {role} must be {list(expected[role])} by the model's config, "
                    f"got {list(linear.weight.shape)}"
                )
