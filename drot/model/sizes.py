"""The sizes of a decoder layer, from the config of its model."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from drot.core.errors import UserError

#: `hidden` is d, `query` is heads · head_dim, `kv` is kv_heads · head_dim, `mlp` the intermediate size,
#: `expert` that of an expert, `shared` that of the shared experts together, `experts` the number of experts.
#: `gated_query` is `query` with a gate for each number. In a linear attention `linear_value` is its heads ·
#: head_dim of values, `linear_qkv` the width of its queries, keys and values together, and `linear_qkvz` that
#: with a gate for each value. In a latent attention (MLA) `latent_q` and `latent_kv` are the widths of the
#: latents of queries and of keys and values, and `latent_kv_rope` is that with the part of the keys that RoPE
#: turns. `mla_query`, `mla_kv` and `mla_value` are heads · head_dim of queries, of keys without RoPE together
#: with values, and of values. `whole_query` is `mla_query` in a model whose queries have no latent.
#: `kv_value` and `mla_value` are the widths of the values of the KV heads, and of all heads, where these have
#: another head_dim than keys.
#: `latent` is the width of what experts read, and write, that do not read the stream.
#: `embedded` is the width of the embedding of each token that a layer has of its own.
#: `convolved` is the width of what a short convolution reads with its two gates. `mamba` is the width of the
#: values of a Mamba, and `mamba_in` that with a gate for each, and with what makes its state and its step.
Width = Literal[
    "hidden",
    "query",
    "kv",
    "mlp",
    "expert",
    "shared",
    "experts",
    "gated_query",
    "linear_value",
    "linear_qkv",
    "linear_qkvz",
    "latent_q",
    "latent_kv",
    "latent_kv_rope",
    "mla_query",
    "mla_kv",
    "mla_value",
    "kv_value",
    "whole_query",
    "latent",
    "embedded",
    "convolved",
    "mamba",
    "mamba_in",
]
#: the widths that are 0 in some models of a family, which then lack the linears of this width
MAY_BE_ABSENT: tuple[Width, ...] = ("shared", "latent_q", "whole_query", "embedded")
#: block of a layer with one block → the kind of the layer; an MLP is the usual of a model without experts
ONE_BLOCK = {"linear_attention": "linear", "full_attention": "attention", "mlp": "dense", "moe": ""}


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


def experts_of(config: Any) -> int:
    """The number of experts of a decoder layer; 0 without.

    Configs of Hunyuan's dense models were published with `num_experts`. They do not say how many a token
    takes.
    """
    if _chosen(config) is None or not getattr(config, "enable_moe_block", True):
        return 0
    if _one_block(config) and "moe" not in getattr(config, "layer_types", ["moe"]):
        return 0
    return _first_of(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _chosen(config: Any) -> Any:
    """How many experts a token takes, as a number or a list of all layers; None without experts."""
    return getattr(config, "num_experts_per_tok", getattr(config, "top_k_experts", None))


def _first_of(config: Any, *names: str) -> int:
    """The first of the entries of a config that is there and not 0; 0 if there is none."""
    return int(next((number for name in names if (number := getattr(config, name, None))), 0))


def layer_kind(config: Any, index: int) -> str:
    """What decoder layer `index` has in place of the usual of its family, in words; "" for the usual.

    `dense` is an MLP in place of experts, `linear` a linear attention, a short convolution or a Mamba, `keys`
    an attention whose keys are its values too, `lends` one whose keys and values later layers read too,
    `borrows` one that reads those of an earlier layer. In a model whose layers have one block each,
    `attention` is an attention, and `latent` experts that read a latent.
    """
    types = getattr(config, "layer_types", None) or ()
    attention = types[index] if types else ""
    if _one_block(config):
        if attention == "moe" and config.moe_latent_size:
            return "latent"
        return ONE_BLOCK[attention] if experts_of(config) or attention != "mlp" else ""
    borrows = borrows_keys(config, index)
    keys = attention == "full_attention" and bool(getattr(config, "attention_k_eq_v", False))
    found = {
        "linear": attention in ("linear_attention", "mamba", "conv"),
        "borrows": borrows,
        "keys": keys and not borrows,
        "lends": lends_keys(config, index) and not keys,
        "dense": _is_dense(config, index),
    }
    return " ".join(kind for kind, holds in found.items() if holds)


def shares_keys(config: Any) -> bool:
    """Whether layers read the keys and values of an earlier layer."""
    return bool(getattr(config, "num_kv_shared_layers", 0))


def check_lending(config: Any) -> None:
    """Raises UserError for layers that borrow keys and values which no layer lends, or without embeddings."""
    if not shares_keys(config):
        return
    count, layers, types = config.num_kv_shared_layers, config.num_hidden_layers, config.layer_types
    lent = set(types[: max(0, layers - count)])
    if not 0 < count < layers or not lent.issuperset(types):
        raise UserError(
            f"the config of a model with {layers} layers must have a num_kv_shared_layers that leaves one of "
            f"each of its layer_types to lend its keys and values to the last layers; got {count}"
        )
    if not getattr(config, "hidden_size_per_layer_input", None):  # transformers fails in the forward pass
        raise UserError(
            f"the config of a model with num_kv_shared_layers {count} must have a "
            f"hidden_size_per_layer_input above 0; got {config.hidden_size_per_layer_input}"
        )


def borrows_keys(config: Any, index: int) -> bool:
    """Whether decoder layer `index` reads the keys and values of an earlier layer."""
    return shares_keys(config) and index >= _first_borrower(config)


def lends_keys(config: Any, index: int) -> bool:
    """Whether later layers may read the keys and values of decoder layer `index`, the last of its type."""
    if not shares_keys(config):
        return False
    own = config.layer_types[: _first_borrower(config)]
    return index < len(own) and own[index] not in own[index + 1 :]


def _first_borrower(config: Any) -> int:
    """The first layer without keys and values of its own."""
    return int(config.num_hidden_layers - config.num_kv_shared_layers)


def _one_block(config: Any) -> bool:
    """Whether each decoder layer has one block."""
    return getattr(config, "model_type", None) == "nemotron_h"


def _is_dense(config: Any, index: int) -> bool:
    """Whether decoder layer `index` has an MLP in a mixture of experts."""
    if not experts_of(config):
        return False
    if (types := getattr(config, "mlp_layer_types", None)) is not None:
        return bool(types[index] == "dense")
    dense = any(
        index < (getattr(config, first, None) or 0) for first in ("first_k_dense_replace", "num_dense_layers")
    )
    dense |= index in (getattr(config, "mlp_only_layers", None) or ())
    for step in ("decoder_sparse_step", "moe_layer_interval"):
        dense |= (index + 1) % (getattr(config, step, None) or 1) != 0
    first, last = (getattr(config, f"moe_layer_{end}_index", None) for end in ("start", "end"))
    return dense or index < (first or 0) or (last is not None and index > last)


def routed_share(config: Any) -> float:
    """The share of the tokens that the router sends to an expert, on average; 1 without experts."""
    if not (experts := experts_of(config)):
        return 1.0
    chosen = _chosen(config)
    return (max(chosen) if isinstance(chosen, list) else chosen) / experts  # Hunyuan has a list of all layers


def head_shape(config: Any, index: int) -> HeadShape:
    """The attention sizes of decoder layer `index` in a model's `config`."""
    if (of_layers := getattr(config, "per_layer_config", None)) is not None:
        config = of_layers[index]
    heads = config.num_attention_heads
    if (of_layers := getattr(config, "num_attention_heads_per_layer", None)) is not None:
        heads = of_layers[index]
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "mimo_v2_flash" and config.layer_types[index] == "sliding_attention":
        kv_heads *= 2
    return HeadShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def mlp_width(config: Any) -> int:
    """The intermediate size of the MLP; 0 in a model whose layers all have experts and that names none."""
    width = _first_of(
        config,
        "shared_intermediate_size",
        "prefix_dense_intermediate_size",
        "intermediate_size",
        "ffn_dim",
    )
    if getattr(config, "block_auto_adjust_ff_dim", False):  # LFM2 gives its MLP two thirds, rounded up
        width = 2 * width // 3
        if (multiplier := config.block_ffn_dim_multiplier) is not None:
            step = config.block_multiple_of
            width = -(-int(multiplier * width) // step) * step
    return width


def widths_of(config: Any, index: int) -> dict[Width, int]:
    """The sizes that a model's `config` gives to the widths of the linears of decoder layer `index`."""
    shape = head_shape(config, index)
    # Hunyuan's config has a list of the same number for each layer, which transformers does not read
    sizes = (getattr(config, f"{of}intermediate_size", None) for of in ("moe_", ""))
    expert = next((size for size in sizes if size and isinstance(size, int)), 0)
    shared_names = (f"{of}_intermediate_size" for of in ("shared_expert", "moe_shared_expert", "shared"))
    shared = _first_of(config, *shared_names)
    of_shared = _first_of(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    key, value = (
        getattr(config, f"linear_num_{of}_heads", 0) * getattr(config, f"linear_{of}_head_dim", 0)
        for of in ("key", "value")
    )
    value = value or getattr(config, "linear_num_heads", 0) * getattr(config, "linear_head_dim", 0)
    wide = getattr(config, "use_double_wide_mlp", False)
    return {
        "hidden": config.hidden_size,
        "query": shape.heads * shape.head_dim,
        "kv": shape.kv_heads * shape.head_dim,
        "mlp": mlp_width(config) * (2 if wide and borrows_keys(config, index) else 1),
        "expert": expert,
        "shared": shared or expert * of_shared,
        "experts": experts_of(config),
        "gated_query": 2 * shape.heads * shape.head_dim,
        "linear_value": value,
        "linear_qkv": 2 * key + value,
        "linear_qkvz": 2 * key + 2 * value,
        "latent": getattr(config, "moe_latent_size", None) or 0,
        "embedded": getattr(config, "hidden_size_per_layer_input", None) or 0,
        "convolved": 3 * config.hidden_size,
        **_mamba_widths(config),
        **_latent_widths(config),
        "kv_value": shape.kv_heads * (getattr(config, "v_head_dim", None) or 0),
    }


def absent_widths(config: Any) -> frozenset[Width]:
    """The widths whose linears a model with `config` lacks."""
    widths = widths_of(config, 0)
    return frozenset(width for width in MAY_BE_ABSENT if not widths[width])


def _mamba_widths(config: Any) -> dict[Width, int]:
    """The widths of a Mamba 2; 0 in other models."""
    if (heads := _first_of(config, "mamba_n_heads", "mamba_num_heads")) == 0:
        return {"mamba": 0, "mamba_in": 0}
    if (size := getattr(config, "ssm_state_size", None)) is not None:  # Nemotron-H
        values, groups = heads * config.mamba_head_dim, config.n_groups
    else:
        values, groups = int(config.mamba_expand * config.hidden_size), config.mamba_n_groups
        size = config.mamba_d_state
    return {"mamba": values, "mamba_in": 2 * values + 2 * groups * size + heads}


def _latent_widths(config: Any) -> dict[Width, int]:
    """The widths of a latent attention; 0 in other models."""
    names = "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
    q, kv, rope, nope, value = (getattr(config, name, None) or 0 for name in names)
    heads = config.num_attention_heads
    return {
        "latent_q": q,
        "latent_kv": kv,
        "latent_kv_rope": kv + rope,
        "mla_query": heads * (nope + rope),
        "mla_kv": heads * (nope + value),
        "mla_value": heads * value,
        "whole_query": 0 if q else heads * (nope + rope),
    }


def check_down_block(size: int, *widths: int) -> None:
    """Raises UserError unless blocks of `size` divide the `widths` of the inputs of each down_proj."""
    if (common := math.gcd(*widths)) % size:
        below = max(divisor for divisor in range(1, min(size, common + 1)) if common % divisor == 0)
        above = min((divisor for divisor in range(size, common + 1) if common % divisor == 0), default=below)
        near = " or ".join(str(divisor) for divisor in dict.fromkeys((below, above)) if divisor > 1)
        *first, last = map(str, dict.fromkeys(widths))
        which = f"intermediate sizes {', '.join(first)} and {last}" if first else f"intermediate size {last}"
        raise UserError(f"`down_rotation` must divide the {which}; got {size}: use {near}")


def vocabulary_of(config: Any) -> int:
    """The number of tokens that a model can predict. It may read more: those of images and sounds."""
    return getattr(config, "output_vocab_size", None) or int(config.vocab_size)


def positions_of(config: Any) -> int | None:
    """The most tokens that a model of `config` reads in one sequence; None if the config names no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_seqlen(seqlen: int, config: Any) -> None:
    """Raises UserError for sequences that are longer than a model of `config` reads."""
    positions = positions_of(config)
    if positions and seqlen > positions:
        raise UserError(f"`seqlen` must be at most {positions}, the positions of this model; got {seqlen}")
