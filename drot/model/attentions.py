"""The declarations of other attentions than that of LLaMA."""

from collections.abc import Callable
from dataclasses import replace

from drot.model.dense import without_r2
from drot.model.family import Family, InputGroup, LinearSpec
from drot.model.sizes import Width

#: The attention of Qwen3-Next multiplies its values by a gate that comes from q_proj, so that no R2 passes.
GATED_ATTENTION = (
    InputGroup(
        name="attention",
        norm="input_layernorm",
        linears=(
            LinearSpec("self_attn.q_proj", ("gated_query", "hidden"), input="r1"),
            LinearSpec("self_attn.k_proj", ("kv", "hidden"), input="r1"),
            LinearSpec("self_attn.v_proj", ("kv", "hidden"), input="r1"),
        ),
    ),
    InputGroup(name="o", linears=(LinearSpec("self_attn.o_proj", ("hidden", "query"), output="r1"),)),
)


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
            LinearSpec("self_attn.q_proj", ("whole_query", "hidden"), input="r1"),
            LinearSpec("self_attn.q_a_proj", ("latent_q", "hidden"), input="r1"),
            LinearSpec("self_attn.kv_a_proj_with_mqa", ("latent_kv_rope", "hidden"), input="r1"),
        ),
    ),
    InputGroup(name="q_b", linears=(LinearSpec("self_attn.q_b_proj", ("mla_query", "latent_q")),)),
    InputGroup(name="kv_b", linears=(LinearSpec("self_attn.kv_b_proj", ("mla_kv", "latent_kv")),)),
    InputGroup(name="o", linears=(LinearSpec("self_attn.o_proj", ("hidden", "mla_value"), output="r1"),)),
)


def latent(family: Family) -> Family:
    """The family with LATENT_ATTENTION in all its layers."""
    norms = ("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm")
    found = replace(family, groups=(*LATENT_ATTENTION, *family.groups[2:]), untouched=norms)
    return found.with_kinds(latent)


def hybrid(family: Family, inputs: dict[str, Width], unpruned: tuple[str, ...]) -> Family:
    """The family with GATED_ATTENTION, some of whose layers have a linear attention instead (Gated DeltaNet).

    Its norms multiply by 1 + γ. Behind its linears a linear attention has a convolution, norms of each head
    and a gate, so that no R2 passes.

    inputs: linear of the linear attention → the width of its outputs. unpruned: its linears with one or two
        outputs for each head, which are rotated alone.
    """

    def gated(one: Family) -> Family:
        return replace(one, norm_offset=1.0, groups=(*GATED_ATTENTION, *one.groups[2:]))

    family = gated(family).with_kinds(gated)
    linears = tuple(
        LinearSpec(f"linear_attn.{one}", (width, "hidden"), input="r1") for one, width in inputs.items()
    )
    attention = InputGroup(name="attention", norm="input_layernorm", linears=linears)
    out = LinearSpec("linear_attn.out_proj", ("hidden", "linear_value"), output="r1")

    def linear(one: Family) -> Family:
        return replace(
            one,
            attention="linear_attn",
            linear_attention=True,
            groups=(attention, InputGroup(name="o", linears=(out,)), *one.groups[2:]),
            untouched=("linear_attn", "linear_attn.conv1d", "linear_attn.norm"),
            unpruned=(*one.unpruned, *((f"linear_attn.{path}", "input_layernorm") for path in unpruned)),
            kinds=(),
        )

    return with_linear_layers(family, linear)


#: Kimi Delta Attention in place of another: a convolution and gates follow its linears, so that no R2 passes.
#: The gates come from linears of low rank, which are not pruned.
DELTA_ATTENTION = (
    InputGroup(
        name="attention",
        norm="input_layernorm",
        linears=tuple(
            LinearSpec(f"self_attn.{one}_proj", ("linear_value", "hidden"), input="r1") for one in "qkv"
        ),
    ),
    InputGroup(name="o", linears=(LinearSpec("self_attn.o_proj", ("hidden", "linear_value"), output="r1"),)),
)


def with_delta_attention(family: Family) -> Family:
    """The family with a latent attention, some of whose layers have DELTA_ATTENTION instead."""

    def delta(one: Family) -> Family:
        readers = ("self_attn.b_proj", "self_attn.g_a_proj", "self_attn.forget_gate.f_a_proj")
        untouched = ("", ".conv1d", ".o_norm", ".g_b_proj", ".forget_gate", ".forget_gate.f_b_proj")
        return replace(
            one,
            linear_attention=True,
            groups=(*DELTA_ATTENTION, *one.groups[len(LATENT_ATTENTION) :]),
            untouched=tuple(f"self_attn{path}" for path in untouched),
            unpruned=(*one.unpruned, *((path, "input_layernorm") for path in readers)),
            files=(("self_attn.forget_gate.", "self_attn."), *one.files),
            parts=(("self_attn.conv1d.weight", tuple(f"self_attn.{one}_conv1d.weight" for one in "qkv")),),
            kinds=(),
        )

    return with_linear_layers(family, delta)
