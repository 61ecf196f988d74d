"""Families some of whose layers have a short convolution or a Mamba in place of the attention.

As in a linear attention, R1 rotates the linear that reads the stream and the linear that writes to it.
Between them lie a convolution and gates, so that no R2 passes.
"""

from dataclasses import replace

from drot.model.dense import LLAMA
from drot.model.family import Family, InputGroup, LinearSpec
from drot.model.sizes import Width


def with_mixer(
    family: Family, mixer: str, inputs: Width, outputs: Width, untouched: tuple[str, ...]
) -> Family:
    """The family some of whose layers have a module `mixer` in place of the attention.

    inputs, outputs: the widths of what its `in_proj` makes and of what its `out_proj` reads.
    untouched: its other weights.
    """

    def mixed(one: Family) -> Family:
        read = LinearSpec(f"{mixer}.in_proj", (inputs, "hidden"), input="r1")
        write = LinearSpec(f"{mixer}.out_proj", ("hidden", outputs), output="r1")
        return replace(
            one,
            attention=mixer,
            linear_attention=True,
            groups=(
                replace(one.groups[0], linears=(read,)),
                InputGroup(name="o", linears=(write,)),
                *one.groups[2:],
            ),
            untouched=untouched,
            kinds=(),
        )

    kinds = [("linear", mixed(family)), *((f"linear {kind}", mixed(one)) for kind, one in family.kinds)]
    return replace(family, kinds=(*family.kinds, *kinds))


#: The layers of LFM2 with attention: norms of other names, and a SiLU that is no module.
LFM2_ATTENTION = Family(
    models="LFM2",
    attention="self_attn",
    mlp="feed_forward",
    activation=None,
    final_norm="model.embedding_norm",
    untouched=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    groups=(
        InputGroup(
            name="attention",
            norm="operator_norm",
            linears=(
                LinearSpec("self_attn.q_proj", ("query", "hidden"), input="r1"),
                LinearSpec("self_attn.k_proj", ("kv", "hidden"), input="r1"),
                LinearSpec("self_attn.v_proj", ("kv", "hidden"), input="r1", output="r2"),
            ),
        ),
        InputGroup(
            name="o",
            linears=(LinearSpec("self_attn.out_proj", ("hidden", "query"), input="r2", output="r1"),),
        ),
        InputGroup(
            name="mlp",
            norm="ffn_norm",
            linears=(
                LinearSpec("feed_forward.w1", ("mlp", "hidden"), input="r1"),
                LinearSpec("feed_forward.w3", ("mlp", "hidden"), input="r1"),
            ),
        ),
        InputGroup(
            name="down",
            linears=(LinearSpec("feed_forward.w2", ("hidden", "mlp"), input="r3", output="r1"),),
        ),
    ),
)


def with_short_convolutions(family: Family) -> Family:
    """The family some of whose layers have a short convolution with two gates in place of the attention."""
    return with_mixer(family, "conv", inputs="convolved", outputs="hidden", untouched=("conv.conv",))


#: Mamba 2 in some layers, or in none. Not supported: experts beside the MLP.
GRANITE4 = with_mixer(
    replace(
        LLAMA,
        mlp="shared_mlp",
        activation="activation",
        residual_multiplier="residual_multiplier",
        logits_divisor="logits_scaling",
        required=(("num_local_experts", 0),),
        groups=(
            *LLAMA.groups[:2],
            InputGroup(
                name="mlp",
                norm="post_attention_layernorm",
                linears=(
                    LinearSpec("shared_mlp.input_linear", ("mlp", "hidden"), input="r1", part="gate_proj"),
                    LinearSpec("shared_mlp.input_linear", ("mlp", "hidden"), input="r1", part="up_proj"),
                ),
            ),
            InputGroup(
                name="down",
                linears=(LinearSpec("shared_mlp.output_linear", ("hidden", "mlp"), input="r3", output="r1"),),
            ),
        ),
    ),
    "mamba",
    inputs="mamba_in",
    outputs="mamba",
    untouched=("mamba", "mamba.conv1d", "mamba.norm"),
)
