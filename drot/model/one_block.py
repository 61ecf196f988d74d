"""Families whose decoder layers have one block each: an attention, a Mamba, an MLP or experts.

R1 rotates what the block reads and what it writes. So each block has a rotation of its own, unless
`layers_per_rotation` joins several.
"""

from dataclasses import replace
from typing import Any

from drot.model.family import Family, InputGroup, LinearSpec, Rotates
from drot.model.sizes import Width


def _reads(path: str, width: Width, **fields: Any) -> LinearSpec:
    """A linear of the block that reads the output of the layer's norm. width: of its outputs."""
    return LinearSpec(f"mixer.{path}", (width, "hidden"), input="r1", **fields)


def _writes(path: str, width: Width, input: Rotates | None = None, **fields: Any) -> LinearSpec:
    """A linear of the block whose outputs are those of the block. width: of its inputs."""
    return LinearSpec(f"mixer.{path}", ("hidden", width), input=input, output="r1", **fields)


def _groups(
    name: str, reads: tuple[LinearSpec, ...], last: str, writes: LinearSpec, *, routed: bool = False
) -> tuple[InputGroup, InputGroup]:
    return (
        InputGroup(name=name, norm="norm", linears=reads, routed=routed),
        InputGroup(name=last, linears=(writes,), routed=routed),
    )


#: An MLP without gate, whose activation fixes the order of the inputs of down_proj.
MLP = Family(
    models="",
    attention=None,
    mlp="mixer",
    groups=_groups("mlp", (_reads("up_proj", "mlp"),), "down", _writes("down_proj", "mlp")),
    embedding="model.embeddings",
    final_norm="model.norm_f",
    body=(("model.", "backbone."),),
)
#: It reads no positions.
ATTENTION = replace(
    MLP,
    attention="mixer",
    groups=_groups(
        "attention",
        (_reads("q_proj", "query"), _reads("k_proj", "kv"), _reads("v_proj", "kv", output="r2")),
        "o",
        _writes("o_proj", "query", input="r2"),
    ),
)
MAMBA = replace(
    MLP,
    attention="mixer",
    linear_attention=True,
    groups=_groups("attention", (_reads("in_proj", "mamba_in"),), "o", _writes("out_proj", "mamba")),
    untouched=("mixer", "mixer.conv1d", "mixer.norm"),
)
SHARED = _groups(
    "shared",
    (_reads("shared_experts.up_proj", "shared"),),
    "shared_down",
    _writes("shared_experts.down_proj", "shared"),
)
#: Experts, and one that reads all tokens.
EXPERTS = replace(
    MLP,
    groups=(
        *_groups(
            "mlp",
            (_reads("experts.up_proj", "expert", part="up_proj"),),
            "down",
            _writes("experts.down_proj", "expert", part="down_proj"),
            routed=True,
        ),
        *SHARED,
    ),
    experts="mixer.experts",
    router="mixer.gate",
    expert_files=tuple((part, f"mixer.experts.{{}}.{part}.weight") for part in ("up_proj", "down_proj")),
)
#: Between the experts and the stream lie two linears, which R1 rotates in place of the experts.
LATENT_IN, LATENT_OUT = _groups(
    "latent", (_reads("fc1_latent_proj", "latent"),), "latent_out", _writes("fc2_latent_proj", "latent")
)
LATENT_EXPERTS = replace(
    EXPERTS,
    groups=(
        LATENT_IN,
        InputGroup(
            name="mlp",
            linears=(LinearSpec("mixer.experts.up_proj", ("expert", "latent"), part="up_proj"),),
            routed=True,
        ),
        InputGroup(
            name="down",
            linears=(LinearSpec("mixer.experts.down_proj", ("latent", "expert"), part="down_proj"),),
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
