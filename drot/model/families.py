"""The table of supported model families: where the weights of each family lie.

The rest of drot finds every weight through this table. To support a new family, add an entry here and a
small model to tests/small_models.py, on which the tests check that rotations leave the outputs unchanged.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from drot.core.errors import UserError

#: The seven linears of a decoder layer, in the order in which they are pruned.
ROLES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Input group → the linears that read the same input and so share one Hessian.
INPUT_GROUPS = {
    "attention": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "mlp": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The sizes of an attention block. heads · head_dim need not equal the hidden size."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """The number of query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The dotted paths of one family's modules in a Hugging Face model.

    `layers`, `embedding`, `final_norm` and `lm_head` start at the model; the other paths start at a decoder
    layer. norm_offset: the number that a norm adds to its stored weight, 0 in LLaMA and 1 in Gemma.
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

    def linear_names(self, index: int) -> dict[str, str]:
        """Role → name of each linear of decoder layer `index`, such as `layers.0.self_attn.q_proj`."""
        return {role: f"layers.{index}.{path}" for role, path in self.linears}


#: The families differ in two more points, neither of which needs a field. The per-head q/k norms of Qwen3
#: act on the outputs of q_proj and k_proj, which are not rotated. Biases are handled by drot/model.
ARCHITECTURES = {name: Architecture(model_type=name) for name in ("llama", "mistral", "qwen2", "qwen3")}


def architecture_of(config: Any) -> Architecture:
    """The entry of ARCHITECTURES for a model's `config`. Raises UserError for a family without an entry."""
    model_type = getattr(config, "model_type", None)
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"model type {model_type!r} is not supported: expected one of {', '.join(ARCHITECTURES)}; "
            "to support a new family, add an entry to drot/model/families.py"
        )
    return ARCHITECTURES[model_type]


def head_shape(config: Any) -> HeadShape:
    """The attention sizes in a model's `config`."""
    heads = config.num_attention_heads
    return HeadShape(
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def positions_of(config: Any) -> int | None:
    """The most tokens that a model of `config` reads in one sequence; None if the config names no limit."""
    return getattr(config, "max_position_embeddings", None)


def module_at(root: nn.Module, path: str) -> Any:
    """The submodule of `root` at a dotted path. Raises UserError if there is none."""
    try:
        return attrgetter(path)(root)
    except AttributeError:
        raise UserError(
            f"{type(root).__name__} has no module {path!r}, which drot/model/families.py lists: load the "
            "model again if it was changed after loading, or correct the entry of its model type"
        ) from None


def decoder_layers(model: nn.Module, arch: Architecture) -> nn.ModuleList:
    """The decoder layers of a model."""
    layers = module_at(model, arch.layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def layer_linears(layer: nn.Module, arch: Architecture) -> dict[str, nn.Linear]:
    """Role → linear of one decoder layer. Raises UserError for a module that is not a plain nn.Linear."""
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
