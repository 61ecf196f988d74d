"""Families whose decoder layers have one block each: an attention, a Mamba, an MLP or experts.

R1 rotates what the block reads and what it writes. So each block has a rotation of its own, unless
`layers_per_rotation` joins several.
"""

from dataclasses import replace

from drot.model.family import Family, LinearSpec, block, reads, writes

#: An MLP without gate, whose activation fixes the order of the inputs of down_proj.
MLP = Family(
    models="",
    attention=None,
    mlp="mixer",
    groups=block(("mlp", "down"), "norm", (reads("mixer.up_proj", "mlp"),), writes("mixer.down_proj", "mlp")),
    embedding="model.embeddings",
    final_norm="model.norm_f",
    body=(("model.", "backbone."),),
)
#: It reads no positions.
ATTENTION = replace(
    MLP,
    attention="mixer",
    groups=block(
        ("attention", "o"),
        "norm",
        (
            reads("mixer.q_proj", "query"),
            reads("mixer.k_proj", "kv"),
            reads("mixer.v_proj", "kv", output="r2"),
        ),
        writes("mixer.o_proj", "query", input="r2"),
    ),
)
MAMBA = replace(
    MLP,
    attention="mixer",
    linear_attention=True,
    groups=block(
        ("attention", "o"), "norm", (reads("mixer.in_proj", "mamba_in"),), writes("mixer.out_proj", "mamba")
    ),
    untouched=("mixer", "mixer.conv1d", "mixer.norm"),
)
SHARED = block(
    ("shared", "shared_down"),
    "norm",
    (reads("mixer.shared_experts.up_proj", "shared"),),
    writes("mixer.shared_experts.down_proj", "shared"),
)
#: Experts, and one that reads all tokens.
EXPERTS = replace(
    MLP,
    groups=(
        *block(
            ("mlp", "down"),
            "norm",
            (reads("mixer.experts.up_proj", "expert", part="up_proj"),),
            writes("mixer.experts.down_proj", "expert", part="down_proj"),
            routed=True,
        ),
        *SHARED,
    ),
    experts="mixer.experts",
    router="mixer.gate",
    expert_files=tuple((part, f"mixer.experts.{{}}.{part}.weight") for part in ("up_proj", "down_proj")),
)
#: Between the experts and the stream lie two linears, which R1 rotates in place of the experts.
LATENT_IN, LATENT_OUT = block(
    ("latent", "latent_out"),
    "norm",
    (reads("mixer.fc1_latent_proj", "latent"),),
    writes("mixer.fc2_latent_proj", "latent"),
)
LATENT_EXPERTS = replace(
    EXPERTS,
    groups=(
        LATENT_IN,
        *block(
            ("mlp", "down"),
            None,
            (LinearSpec("mixer.experts.up_proj", ("expert", "latent"), part="up_proj"),),
            LinearSpec("mixer.experts.down_proj", ("latent", "expert"), part="down_proj"),
            routed=True,
        ),
        LATENT_OUT,
        *SHARED,
    ),
)

NEMOTRON_H = replace(
    EXPERTS,
    models="Nemotron-H, Nemotron Nano 2, Nemotron 3",
    needs="GroupWeightRename",  # an older transformers names the blocks in another way
    kinds=(
        ("latent", LATENT_EXPERTS),
        ("dense", MLP),
        *((kind, MAMBA) for kind in ("linear", "linear dense")),
        *((kind, ATTENTION) for kind in ("attention", "attention dense")),
    ),
)
