"""Declarations of decoder layers with experts in place of the MLP, or beside it."""

from dataclasses import replace

from drot.model.dense import LLAMA, inside, with_norms, with_paths
from drot.model.family import Family, block, reads, writes
from drot.model.sizes import Width


def files_of_experts(mlp: str, gate: str, up: str, down: str) -> tuple[tuple[str, str], ...]:
    """The `expert_files` of a family whose files have these names for the linears of an expert."""
    names = zip(("gate_proj", "up_proj", "down_proj"), (gate, up, down), strict=True)
    return tuple((part, f"{mlp}.experts.{{}}.{name}.weight") for part, name in names)


#: Experts in place of the MLP. Each has its own blocks of R3.
MIXTURE = replace(
    LLAMA,
    experts="mlp.experts",
    router="mlp.gate",
    groups=(
        *LLAMA.groups[:2],
        *block(
            ("mlp", "down"),
            "post_attention_layernorm",
            (
                reads("mlp.experts.gate_up_proj", "expert", part="gate_proj"),
                reads("mlp.experts.gate_up_proj", "expert", part="up_proj"),
            ),
            writes("mlp.experts.down_proj", "expert", input="r3", part="down_proj"),
            routed=True,
        ),
    ),
    kinds=(("dense", LLAMA),),
    expert_files=files_of_experts("mlp", "gate_proj", "up_proj", "down_proj"),
)


def with_shared_experts(
    family: Family,
    path: str,
    gate: str | None = None,
    *,
    width: Width = "shared",
    weighted: bool = False,
) -> Family:
    """The mixture with experts at `path` that read all tokens. They are pruned after the others, so that
    with `target="dense"` their outputs make up for the errors of the others.

    gate: the module whose sigmoid multiplies their outputs. width: of their outputs of gate and up.
    weighted: as in `InputGroup`; it is True with a gate.
    """
    mlp, down = block(
        ("shared", "shared_down"),
        "post_attention_layernorm",
        (reads(f"{path}.gate_proj", width), reads(f"{path}.up_proj", width)),
        writes(f"{path}.down_proj", width, input="r3"),
    )
    down = replace(down, weighted=weighted or gate is not None)
    unpruned = () if gate is None else ((gate, "post_attention_layernorm"),)
    return replace(family, groups=(*family.groups, mlp, down), unpruned=(*family.unpruned, *unpruned))


def with_indexer(family: Family, *, returned: bool = False) -> Family:
    """The family with latent attention to those tokens alone that an indexer in each layer chooses.

    R1 rotates the linears of the indexer that read the stream, which are never pruned. Another one reads the
    latent of the queries, which nothing rotates.

    returned: as `returns_choice` of a family.
    """
    readers = ("self_attn.indexer.wk", "self_attn.indexer.weights_proj")
    found = replace(
        family,
        untouched=(*family.untouched, "self_attn.indexer.wq_b", "self_attn.indexer.k_norm"),
        unpruned=(*family.unpruned, *((path, "input_layernorm") for path in readers)),
        returns_choice=returned,
    )
    return found.with_kinds(lambda one: with_indexer(one, returned=returned))


def with_mlp_at(family: Family, mlp: str) -> Family:
    """The mixture with another name of the module around the experts, which all its layers have."""

    def moved(path: str) -> str:
        return mlp + path.removeprefix("mlp") if path.startswith("mlp.") else path

    assert family.experts is not None and family.router is not None
    found = family.with_linears(lambda one: replace(one, path=moved(one.path)))
    return replace(found, mlp=mlp, experts=moved(family.experts), router=moved(family.router), kinds=())


def with_dense_layers(family: Family, dense: Family) -> Family:
    """The mixture some of whose layers, of each of its kinds, are those of `dense`."""
    kinds = (("dense", dense), *((f"{kind} dense", one) for kind, one in dense.kinds))
    return replace(family, kinds=(*family.kinds, *kinds))


def with_shared_mlp(family: Family) -> Family:
    """The mixture of Granite with an MLP beside its experts that reads all tokens, pruned after them."""
    shared = block(
        ("shared", "shared_down"),
        "post_attention_layernorm",
        (reads("shared_mlp.input_linear", "shared", part=part) for part in ("gate_proj", "up_proj")),
        writes("shared_mlp.output_linear", "shared", input="r3", part="down_proj"),
    )
    return replace(family, groups=(*family.groups, *shared), beside="shared_mlp", activation="activation")


def with_experts_beside(family: Family) -> Family:
    """Gemma 4, also its layers of other kinds, with experts beside the MLP, which are pruned before it.

    They and their router read the stream, each by a norm of its own.
    """
    paths = {f"mlp.experts.{name}": f"experts.{name}" for name in ("gate_up_proj", "down_proj")}
    experts = with_norms(inside(with_paths(MIXTURE, paths)), None, "pre_feedforward_layernorm_2").groups[2:]
    found = replace(
        family,
        experts="experts",
        experts_beside=(
            "router",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
        ),
        groups=(*family.groups[:2], *experts, *family.groups[2:]),
    )
    return found.with_kinds(with_experts_beside)
