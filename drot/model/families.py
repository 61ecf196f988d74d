"""The supported model families, each a declaration of where its weights lie and how rotations act on them.

Nothing outside of drot/model knows the name of a module. A new family is a new entry of FAMILIES, and a small
model in tests/small_models.py, on which the tests check that rotations leave the outputs unchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from drot.core.errors import UserError

#: R1 [d, d] rotates the residual stream, R2 [head_dim, head_dim] the values of a KV head.
Rotates = Literal["r1", "r2"]
#: `hidden` is d, `query` is heads · head_dim, `kv` is kv_heads · head_dim, `mlp` the intermediate size.
Width = Literal["hidden", "query", "kv", "mlp"]


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


@dataclass(frozen=True)
class LinearSpec:
    """One linear of a decoder layer.

    path: the module in the layer.
    shape: the widths (outputs, inputs) of its weight W.
    input: the rotation R of its input, merged as W R; None if the input is not rotated.
    output: the rotation R of its outputs, merged as Rᵀ W; None if they are not rotated.
    part: the name of the linear if it is a slice of a fused module. The slices of a module lie one below the
        other, in the order of their declaration.
    """

    path: str
    shape: tuple[Width, Width]
    input: Rotates | None = None
    output: Rotates | None = None
    part: str | None = None

    @property
    def name(self) -> str:
        """The name by which the rest of drot calls the linear, such as `q_proj`."""
        return self.part or self.path.rpartition(".")[2]

    @property
    def writes_residual(self) -> bool:
        return self.output == "r1"


@dataclass(frozen=True, kw_only=True)
class InputGroup:
    """The linears that read one input, and so share one Hessian.

    norm: path of the RMSNorm that makes the input; None if the input comes from elsewhere. Its weight is
        folded into the linears before a rotation.
    """

    name: str
    linears: tuple[LinearSpec, ...]
    norm: str | None = None

    @property
    def input(self) -> Rotates | None:
        return self.linears[0].input

    @property
    def writes_residual(self) -> bool:
        return self.linears[0].writes_residual


@dataclass(frozen=True, kw_only=True)
class Family:
    """The parts of a Hugging Face causal language model and of its decoder layers, as dotted paths.

    groups: the input groups in the order of the forward pass, which is the order of the pruning.
    attention, mlp: the two blocks of a decoder layer. The layer adds the output of each to its residual
        stream.
    """

    groups: tuple[InputGroup, ...]
    attention: str
    mlp: str
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The linears of a decoder layer, in the order in which they are pruned."""
        return tuple(linear for group in self.groups for linear in group.linears)

    @property
    def norms(self) -> tuple[str, ...]:
        """The paths of the norms whose weights are folded into linears."""
        return tuple(group.norm for group in self.groups if group.norm is not None)

    @property
    def first_norm(self) -> str:
        """The path of the norm that reads the input of a decoder layer."""
        return self.norms[0]

    def full_name(self, index: int, linear: LinearSpec) -> str:
        """The name by which patterns find a linear of decoder layer `index`: `layers.0.self_attn.q_proj`."""
        return f"layers.{index}.{linear.path.rpartition('.')[0]}.{linear.name}"

    def names(self, layers: int) -> Iterator[tuple[str, LinearSpec]]:
        """The full name and the declaration of each linear of a model with this number of decoder layers."""
        for index in range(layers):
            for linear in self.linears:
                yield self.full_name(index, linear), linear


#: Pre-norm attention with grouped queries, then a pre-norm gated MLP. The norms of each head in Qwen3 act on
#: the outputs of q_proj and k_proj, which are not rotated.
LLAMA = Family(
    attention="self_attn",
    mlp="mlp",
    groups=(
        InputGroup(
            name="attention",
            norm="input_layernorm",
            linears=(
                LinearSpec("self_attn.q_proj", ("query", "hidden"), input="r1"),
                LinearSpec("self_attn.k_proj", ("kv", "hidden"), input="r1"),
                LinearSpec("self_attn.v_proj", ("kv", "hidden"), input="r1", output="r2"),
            ),
        ),
        InputGroup(
            name="o",
            linears=(LinearSpec("self_attn.o_proj", ("hidden", "query"), input="r2", output="r1"),),
        ),
        InputGroup(
            name="mlp",
            norm="post_attention_layernorm",
            linears=(
                LinearSpec("mlp.gate_proj", ("mlp", "hidden"), input="r1"),
                LinearSpec("mlp.up_proj", ("mlp", "hidden"), input="r1"),
            ),
        ),
        InputGroup(
            name="down",
            linears=(LinearSpec("mlp.down_proj", ("hidden", "mlp"), output="r1"),),
        ),
    ),
)
#: `model_type` of a config.json → family
FAMILIES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "smollm3": LLAMA}


def family_of(config: Any) -> Family:
    """The family of a model with `config`. Raises UserError for a model type that is not in FAMILIES."""
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise UserError(
            f"model type {model_type!r} is not supported: expected one of {', '.join(FAMILIES)}; "
            "to support a new family, add an entry to drot/model/families.py"
        )
    return FAMILIES[model_type]


def head_shape(config: Any) -> HeadShape:
    """The attention sizes in a model's `config`."""
    heads = config.num_attention_heads
    return HeadShape(
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def widths_of(config: Any) -> dict[Width, int]:
    """The sizes that a model's `config` gives to the widths of linears."""
    shape = head_shape(config)
    return {
        "hidden": config.hidden_size,
        "query": shape.heads * shape.head_dim,
        "kv": shape.kv_heads * shape.head_dim,
        "mlp": config.intermediate_size,
    }


def positions_of(config: Any) -> int | None:
    """The most tokens that a model of `config` reads in one sequence; None if the config names no limit."""
    return getattr(config, "max_position_embeddings", None)
