"""Families some of whose layers have a short convolution or a Mamba in place of the attention.

As in a linear attention, R1 rotates the linear that reads the stream and the linear that writes to it.
Between them lie a convolution and gates, so that no R2 passes.
"""

from dataclasses import replace

from drot.model.attentions import with_linear_layers
from drot.model.dense import GRANITE, LLAMA, between_norms, with_norms, with_paths
from drot.model.family import Family, block, reads, writes
from drot.model.sizes import Width


def with_mixer(
    family: Family, mixer: str, inputs: Width, outputs: Width, untouched: tuple[str, ...]
) -> Family:
    """The family some of whose layers have a module `mixer` in place of the attention.

    inputs, outputs: the widths of what its `in_proj` makes and of what its `out_proj` reads.
    untouched: its other weights.
    """

    def mixed(one: Family) -> Family:
        (o_proj,) = one.groups[1].linears
        mixing = block(
            ("attention", "o"),
            one.groups[0].norm,
            (reads(f"{mixer}.in_proj", inputs),),
            writes(f"{mixer}.out_proj", outputs, output=o_proj.output),
        )
        return replace(
            one,
            attention=mixer,
            linear_attention=True,
            groups=(*mixing, *one.groups[2:]),
            untouched=untouched,
            unpruned=(),
            kinds=(),
        )

    return with_linear_layers(family, mixed)


#: The layers of LFM2 with attention: other names, and a SiLU that is no module.
LFM2_ATTENTION = replace(
    with_paths(
        with_norms(LLAMA, "operator_norm", "ffn_norm"),
        {
            "self_attn.o_proj": "self_attn.out_proj",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
    ),
    models="LFM2",
    tied_elsewhere=True,
    mlp="feed_forward",
    activation=None,
    final_norm="model.embedding_norm",
    untouched=("self_attn.q_layernorm", "self_attn.k_layernorm"),
)

#: LFM3 has a norm on both sides of each block, and a gate for each head of its attention, which R2 passes.
LFM3_ATTENTION = replace(
    with_paths(
        between_norms(LFM2_ATTENTION, ("operator_norm", "ffn_norm"), ("post_operator_norm", "post_ffn_norm")),
        {"self_attn.out_proj": "self_attn.o_proj"},
    ),
    models="LFM3",
    untouched=LLAMA.untouched,
    unpruned=(("self_attn.g_proj", "operator_norm"),),
    files=(("self_attn.g_proj.", "self_attn.gate_proj."),),
    required=(("use_sandwich_norm", True), ("use_attention_gate", True)),
)


def with_short_convolutions(family: Family) -> Family:
    """The family some of whose layers have a short convolution with two gates in place of the attention."""
    return with_mixer(family, "conv", inputs="convolved", outputs="hidden", untouched=("conv.conv",))


def with_mamba(family: Family) -> Family:
    """The family some of whose layers have a Mamba 2 in place of the attention."""
    own = ("mamba", "mamba.conv1d", "mamba.norm")
    return with_mixer(family, "mamba", inputs="mamba_in", outputs="mamba", untouched=own)


#: Granite 4.0 without experts: its MLP has the name of what reads all tokens beside experts.
GRANITE4 = replace(
    GRANITE.with_fused("shared_mlp.input_linear", ("gate_proj", "up_proj")).with_fused(
        "shared_mlp.output_linear", ("down_proj",)
    ),
    mlp="shared_mlp",
    activation="activation",
)
