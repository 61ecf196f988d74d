"""Hypothesis strategies for small random models of every supported family."""

import math
from typing import Any

import torch
from hypothesis import strategies as st
from small_models import FAMILIES, random_tokens, small_model
from torch import nn

#: the plain members of FAMILIES, whose settings `settings_of_models` replaces
BARE = sorted({family.partition("-")[0] for family in FAMILIES})
#: positions that a model was trained for, beyond which RoPE is scaled
ORIGINAL_POSITIONS = 16


def _rope(draw: st.DrawFn) -> dict[str, Any]:
    """`rope_parameters` of config.json, and `max_position_embeddings` that goes with them."""
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3"]))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from([100.0, 1e4, 5e5]))}
    if kind != "default":
        rope["factor"] = draw(st.sampled_from([1.5, 2.0, 8.0]))
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = ORIGINAL_POSITIONS
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    # `dynamic` scales beyond this number of positions, `yarn` expects factor · original
    positions = {"dynamic": ORIGINAL_POSITIONS, "yarn": int(ORIGINAL_POSITIONS * rope.get("factor", 1))}
    return {"rope_parameters": rope, "max_position_embeddings": positions.get(kind, 128)}


@st.composite
def settings_of_models(draw: st.DrawFn, multiple: int = 4) -> dict[str, Any]:
    """The arguments of `small_model`: a family, a seed, a dtype, and settings of the config.

    multiple: the hidden size, the intermediate size and heads · head_dim are multiples of it.
    """
    family = draw(st.sampled_from(BARE))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    # RoPE turns pairs; `dynamic` divides by head_dim - 2
    dims = [dim for dim in (4, 6, 8, 12, 16) if heads * dim % multiple == 0]
    head_dim = draw(st.sampled_from(dims))
    # LLaMA's config demands a hidden size that the heads divide
    step = math.lcm(multiple, heads) if family == "llama" else multiple
    sizes = st.integers(1, max(1, 48 // step)).map(lambda count: count * step)
    hidden = draw(st.one_of(sizes, st.just(heads * head_dim)))
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
        **_rope(draw),
    )
    if hidden == heads * head_dim and draw(st.booleans()):  # head_dim is then hidden / heads
        if family in ("qwen2", "smollm3"):
            del chosen["head_dim"]
        elif family != "qwen3":
            chosen["head_dim"] = None
    if family in ("llama", "qwen3", "smollm3"):
        chosen["attention_bias"] = draw(st.booleans())
    if family in ("llama", "smollm3"):
        chosen["mlp_bias"] = draw(st.booleans())
    window = draw(st.sampled_from([None, 3, 10]))
    if family == "mistral":
        chosen["sliding_window"] = window
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
