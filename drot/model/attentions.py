"""The declarations of other attentions than that of LLaMA."""

from collections.abc import Callable
from dataclasses import replace

from drot.model.dense import without_r2
from drot.model.family import Family, InputGroup, LinearSpec, block, reads, writes
from drot.model.sizes import Width


def with_linear_layers(family: Family, linear: Callable[[Family], Family]) -> Family:
    """The family some of whose layers, of each of its kinds, are what `linear` makes of the others."""
    kinds = [("linear", linear(family)), *((f"linear {kind}", linear(one)) for kind, one in family.kinds)]
    return replace(family, kinds=(*family.kinds, *kinds))


def with_gate(family: Family, gate: str) -> Family:
    """The family whose attention multiplies its values by what the linear `gate` makes of its input.

    R1 rotates the gate, which is never pruned. No R2 passes it.
    """
    norm = family.groups[0].norm
    assert norm is not None
    found = replace(without_r2(family), unpruned=(*family.unpruned, (gate, norm)))
    return found.with_kinds(lambda one: with_gate(one, gate))


def with_value_heads(family: Family) -> Family:
    """The family whose attention has other sizes of heads for values than for keys.

    drot has no R2 of that size.
    """

    def resized(one: LinearSpec) -> LinearSpec:
        if one.path == "self_attn.v_proj":
            return replace(one, shape=("kv_value", "hidden"))
        return replace(one, shape=("hidden", "mla_value")) if one.path == "self_attn.o_proj" else one

    return without_r2(family).with_linears(resized).with_kinds(with_value_heads)


#: A latent attention (MLA): R1 rotates what reads the stream and what writes it. Norms of the latents follow,
#: and a head's values lie between its keys in one linear, which no R2 rotates here. Where the queries have no
#: latent, q_proj takes the place of q_a_proj and q_b_proj.
LATENT_ATTENTION = (
    InputGroup(
        name="attention",
        norm="input_layernorm",
        linears=(
            reads("self_attn.q_proj", "whole_query"),
            reads("self_attn.q_a_proj", "latent_q"),
            reads("self_attn.kv_a_proj_with_mqa", "latent_kv_rope"),
        ),
    ),
    InputGroup(name="q_b", linears=(LinearSpec("self_attn.q_b_proj", ("mla_query", "latent_q")),)),
    InputGroup(name="kv_b", linears=(LinearSpec("self_attn.kv_b_proj", ("mla_kv", "latent_kv")),)),
    InputGroup(name="o", linears=(writes("self_attn.o_proj", "mla_value"),)),
)


def latent(family: Family) -> Family:
    """The family with LATENT_ATTENTION in all its layers."""
    norms = ("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm")
    found = replace(family, groups=(*LATENT_ATTENTION, *family.groups[2:]), untouched=norms)
    return found.with_kinds(latent)


def hybrid(family: Family, inputs: dict[str, Width], unpruned: tuple[str, ...]) -> Family:
    """The family with Qwen3-Next's attention, some of whose layers have a Gated DeltaNet instead.

    Its norms multiply by 1 + γ. No R2 passes: the attention multiplies its values by a gate that comes from
    q_proj, and behind the linears of a Gated DeltaNet lie a convolution, norms of each head and a gate.

    inputs: linear of the linear attention → the width of its outputs. unpruned: its linears with one or two
        outputs for each head, which are rotated alone.
    """

    def gated(one: Family) -> Family:
        def with_gates(spec: LinearSpec) -> LinearSpec:
            return reads(spec.path, "gated_query") if spec.path == "self_attn.q_proj" else spec

        return replace(without_r2(one).with_linears(with_gates), norm_offset=1.0)

    def linear(one: Family) -> Family:
        attention = block(
            ("attention", "o"),
            "input_layernorm",
            (reads(f"linear_attn.{path}", width) for path, width in inputs.items()),
            writes("linear_attn.out_proj", "linear_value"),
        )
        return replace(
            one,
            attention="linear_attn",
            linear_attention=True,
            groups=(*attention, *one.groups[2:]),
            untouched=("linear_attn", "linear_attn.conv1d", "linear_attn.norm"),
            unpruned=(*one.unpruned, *((f"linear_attn.{path}", "input_layernorm") for path in unpruned)),
            kinds=(),
        )

    return with_linear_layers(gated(family).with_kinds(gated), linear)


def with_delta_attention(family: Family) -> Family:
    """The family with a latent attention, some of whose layers have Kimi Delta Attention instead.

    A convolution and gates follow its linears, so that no R2 passes. The gates come from linears of low rank,
    which are not pruned.
    """
    attention = block(
        ("attention", "o"),
        "input_layernorm",
        (reads(f"self_attn.{one}_proj", "linear_value") for one in "qkv"),
        writes("self_attn.o_proj", "linear_value"),
    )

    def delta(one: Family) -> Family:
        readers = ("self_attn.b_proj", "self_attn.g_a_proj", "self_attn.forget_gate.f_a_proj")
        untouched = ("", ".conv1d", ".o_norm", ".g_b_proj", ".forget_gate", ".forget_gate.f_b_proj")
        return replace(
            one,
            linear_attention=True,
            groups=(*attention, *one.groups[len(LATENT_ATTENTION) :]),
            untouched=tuple(f"self_attn{path}" for path in untouched),
            unpruned=(*one.unpruned, *((path, "input_layernorm") for path in readers)),
            files=(("self_attn.forget_gate.", "self_attn."), *one.files),
            parts=(("self_attn.conv1d.weight", tuple(f"self_attn.{one}_conv1d.weight" for one in "qkv")),),
            kinds=(),
        )

    return with_linear_layers(family, delta)
