"""The supported model families, each a declaration of where its weights lie and how rotations act on them.

Nothing outside of drot/model knows the name of a module. A new family is a new entry of FAMILIES, and a small
model in tests/small_models.py, on which the tests check that rotations leave the outputs unchanged.
"""

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from drot.core.errors import UserError
from drot.model.sizes import Width, experts_of, layer_kind

#: R1 [d, d] rotates the residual stream, R2 [head_dim, head_dim] the values of a KV head, R3 the input of
#: down_proj in diagonal blocks [b, b]. Nothing in front of down_proj can take R3, so that a model applies it
#: while it runs (boundary.py), and a run may do without it. Where the stream cannot rotate, R1 acts on the
#: inputs of the attention and of the MLP, and the model applies it while it runs too.
Rotates = Literal["r1", "r2", "r3"]


@dataclass(frozen=True)
class LinearSpec:
    """One linear of a decoder layer.

    path: the module in the layer.
    shape: the widths (outputs, inputs) of its weight W.
    input: the rotation R of its input, merged as W R; None if the input is not rotated.
    output: the rotation R of its outputs, merged as Rᵀ W; None if they are not rotated.
    part: the name of the linear if it is a slice of a fused module. The slices of a module lie one below the
        other, in the order of their declaration.
    expert: the number of its expert; the path is then that of a parameter [experts, out, in].
    transposed: whether this parameter is [experts, in, out], and the outputs of the slices alternate. The
        parameter with the biases has the same name with `_bias`.
    """

    path: str
    shape: tuple[Width, Width]
    input: Rotates | None = None
    output: Rotates | None = None
    part: str | None = None
    expert: int | None = None
    transposed: bool = False

    @property
    def name(self) -> str:
        """The name by which the rest of drot calls the linear, such as `q_proj` or `experts.3.up_proj`."""
        name = self.part or self.path.partition(".")[2] or self.path
        return name if self.expert is None else f"experts.{self.expert}.{name}"

    @property
    def rotations(self) -> set[Rotates | None]:
        """The rotations that act on it."""
        return {self.input, self.output} - {None}

    @property
    def block(self) -> str:
        """The block of the layer that the linear belongs to."""
        return self.path.partition(".")[0]

    @property
    def writes_residual(self) -> bool:
        """Whether its outputs are those of the attention or of the MLP."""
        return self.shape[0] == "hidden"


def by_module(linears: Iterable[LinearSpec]) -> list[list[LinearSpec]]:
    """The linears by their module: one alone, or the slices of a fused module."""
    found: dict[str, list[LinearSpec]] = {}
    for linear in linears:
        found.setdefault(linear.path, []).append(linear)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class InputGroup:
    """The linears that read one input, and so share one Hessian.

    norm: path of the norm that makes the input; None if the input comes from elsewhere. If R1 rotates the
        residual stream, its weight is folded into the linears before a rotation.
    routed: whether it stands for a group of each expert, which reads the tokens that the router sends there.
    weighted: whether the layer multiplies its outputs by numbers that it computes, before it adds them.
    """

    name: str
    linears: tuple[LinearSpec, ...]
    norm: str | None = None
    routed: bool = False
    weighted: bool = False

    def of_expert(self, expert: int) -> "InputGroup":
        linears = tuple(replace(linear, expert=expert) for linear in self.linears)
        return replace(self, name=f"{self.name}.{expert}", linears=linears)

    @property
    def expert(self) -> int | None:
        """The number of the expert that the linears belong to."""
        return self.linears[0].expert

    @property
    def input(self) -> Rotates | None:
        return self.linears[0].input

    @property
    def writes_residual(self) -> bool:
        return self.linears[0].writes_residual


@dataclass(frozen=True, kw_only=True)
class Family:
    """The parts of a Hugging Face causal language model and of its decoder layers, as dotted paths.

    models: the names of published models.
    groups: the input groups in the order of the forward pass, which is the order of the pruning.
    attention, mlp: the two blocks of a decoder layer. The layer adds the output of each to its residual
        stream.
    mlp_front: the modules of the MLP that the layer itself calls, one after the other, before it calls `mlp`.
    activation: the module of the MLP that acts on the outputs of the gate.
    gated: the method of the experts that makes the input of down_proj from the outputs of gate and up, which
        alternate; None if it is activation(gate) * up.
    mlp_dropout: the attribute of the MLP with the probability of the dropout of its outputs.
    residual_multiplier: the attribute of a layer with the number by which it multiplies the output of each
        block before it adds it; None if it only adds.
    post_norms: the norms of the outputs of the attention and of the MLP, which the layer then adds.
    norm_offset: what the norms add to their weight before they multiply by it.
    layer_norm: whether the norms subtract the mean, so that only an R1 with R1 1 = 1 commutes with them.
    parallel: whether the MLP reads what the attention reads, and not the stream behind the attention.
    logits_divisor: the attribute of the config by which the model divides its logits.
    logits_multiplier: the attribute of the config by which it multiplies them.
    logits_cap: the attribute of the config with the bound c of the logits, c tanh(logits / c); its value may
        be None.
    residual_dropouts: the modules of a layer that act on the outputs of the attention and of the MLP before
        it adds them, in training alone.
    residual_dropout: the attribute of a layer with the probability of such a dropout.
    linear_attention: whether the attention keeps a state instead of keys and values: it takes no positions,
        and returns its output alone.
    untouched: modules with weights that a layer may have and that see nothing rotated.
    unpruned: path of a module with a weight [any, d] → path of the norm whose output it reads. It is rotated
        as the linears behind this norm are, and never pruned.
    experts: the module with the parameters [experts, out, in] of all experts, in a mixture of experts.
    router: the module with the weight [experts, d] that chooses the experts of a token. It reads what the
        experts read, and is `unpruned`.
    expert_files: part → the name in files of the weight of expert `{}` in a layer, where each lies by itself;
        empty if the files hold the parameters of all experts.
    router_file: the name of the router's weight there.
    kinds: kind of a layer (`layer_kind`) → the declaration of such a layer, where it differs from this one.
    positions: the embedding of the positions, which is added to that of the tokens.
    required: attribute of the config → the value for which the declaration holds.
    """

    models: str
    groups: tuple[InputGroup, ...]
    attention: str
    mlp: str
    mlp_front: tuple[str, ...] = ()
    activation: str = "act_fn"
    gated: str | None = None
    mlp_dropout: str | None = None
    residual_multiplier: str | None = None
    post_norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    layer_norm: bool = False
    parallel: bool = False
    logits_divisor: str | None = None
    logits_multiplier: str | None = None
    logits_cap: str | None = None
    residual_dropouts: tuple[str, str] | None = None
    residual_dropout: str | None = None
    linear_attention: bool = False
    untouched: tuple[str, ...] = ()
    unpruned: tuple[tuple[str, str], ...] = ()
    experts: str | None = None
    router: str | None = None
    expert_files: tuple[tuple[str, str], ...] = ()
    router_file: str = ""
    kinds: tuple[tuple[str, "Family"], ...] = ()
    required: tuple[tuple[str, Any], ...] = ()
    positions: str | None = None
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The linears of a decoder layer, in the order in which they are pruned."""
        return tuple(linear for group in self.groups for linear in group.linears)

    def with_fused(self, module: str, parts: Collection[str]) -> "Family":
        """The family whose linears `parts` are slices of one module, in the order of their declaration."""

        def fused(linear: LinearSpec) -> LinearSpec:
            return replace(linear, path=module, part=linear.name) if linear.name in parts else linear

        groups = (replace(group, linears=tuple(map(fused, group.linears))) for group in self.groups)
        return replace(self, groups=tuple(groups))

    def with_experts(self, count: int) -> "Family":
        """The family with the groups of `count` experts in place of the groups that stand for each of them.

        The groups of an expert follow each other.
        """
        groups: list[InputGroup] = []
        for routed, of_kind in itertools.groupby(self.groups, lambda group: group.routed):
            found = list(of_kind)
            groups += (one.of_expert(e) for e in range(count) for one in found) if routed else found
        return replace(self, groups=tuple(groups))

    def with_transposed_experts(self) -> "Family":
        """The family with `transposed` linears of experts."""

        def transposed(group: InputGroup) -> InputGroup:
            return replace(group, linears=tuple(replace(one, transposed=True) for one in group.linears))

        return replace(self, groups=tuple(transposed(one) if one.routed else one for one in self.groups))

    def takes(self, rotation: Rotates) -> bool:
        """Whether `rotation` acts on a linear of the family."""
        return any(rotation in linear.rotations for linear in self.linears)

    @property
    def rotates_stream(self) -> bool:
        """Whether R1 rotates the residual stream, and not only what a layer makes of it."""
        return any(linear.output == "r1" for linear in self.linears)

    @property
    def embeddings(self) -> tuple[str, ...]:
        """The embedding of the tokens and, if there is one, that of the positions."""
        return (self.embedding,) if self.positions is None else (self.embedding, self.positions)

    @property
    def norms(self) -> tuple[str, ...]:
        """The paths of the norms in front of linears."""
        return tuple(dict.fromkeys(group.norm for group in self.groups if group.norm is not None))

    @property
    def readers(self) -> tuple[tuple[str, str], ...]:
        """`unpruned`, with the router."""
        return self.unpruned if self.router is None else ((self.router, self.norms[-1]), *self.unpruned)

    @property
    def mlp_inputs(self) -> tuple[str, ...]:
        """The modules that read the input of the MLP, as paths in the MLP: gate and up, or one for both."""
        linears = next(group.linears for group in self.groups if group.name == "mlp")
        return tuple(dict.fromkeys(linear.path.removeprefix(f"{self.mlp}.") for linear in linears))

    @property
    def mlp_output(self) -> str:
        """The module that computes the output of the MLP, as a path in the MLP."""
        return self.linears[-1].path.removeprefix(f"{self.mlp}.")

    @property
    def block_norms(self) -> tuple[str, str]:
        """The norm of the attention and the norm of the MLP: those in front of them, or else behind them."""
        if self.norms:
            return self.norms[0], self.norms[-1]
        assert self.post_norms is not None
        return self.post_norms

    def full_name(self, index: int, linear: LinearSpec) -> str:
        """The name by which patterns find a linear of decoder layer `index`: `layers.0.self_attn.q_proj`."""
        name = f"{linear.block}.{linear.name}" if "." in linear.path else linear.path
        return f"layers.{index}.{name}"


#: Pre-norm attention with grouped queries, then a pre-norm gated MLP. The norms of each head in Qwen3, and
#: the factor of the queries by their position in Ministral 3, act on the outputs of q_proj and k_proj, which
#: are not rotated.
LLAMA = Family(
    models="LLaMA 1–3",
    attention="self_attn",
    mlp="mlp",
    untouched=("self_attn.q_norm", "self_attn.k_norm"),
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
            linears=(LinearSpec("mlp.down_proj", ("hidden", "mlp"), input="r3", output="r1"),),
        ),
    ),
)


def _inside(family: Family) -> Family:
    """The family whose stream nothing rotates: R1 acts on the inputs of attention and MLP alone."""

    def unrotated(linear: LinearSpec) -> LinearSpec:
        return replace(linear, output=None) if linear.output == "r1" else linear

    groups = (replace(group, linears=tuple(map(unrotated, group.linears))) for group in family.groups)
    return replace(family, groups=tuple(groups))


def _with_norms(family: Family, attention: str | None, mlp: str | None) -> Family:
    """The family with other norms in front of its attention and its MLP."""
    norms = {"attention": attention, "mlp": mlp}
    groups = (replace(group, norm=norms.get(group.name)) for group in family.groups)
    return replace(family, groups=tuple(groups))


#: Norms behind attention and MLP, and none in front of them. The weight of such a norm acts between a block
#: and the stream, where no rotation passes it.
POST_NORM = replace(
    _with_norms(_inside(LLAMA), None, None),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
#: Norms on both sides of attention and MLP.
SANDWICH = replace(
    _with_norms(_inside(LLAMA), "input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    logits_cap="final_logit_softcapping",
)
#: The MLP of some layers of a mixture. No layer of a mixture takes R3.
DENSE_MLP = (
    LLAMA.groups[2],
    InputGroup(name="down", linears=(LinearSpec("mlp.down_proj", ("hidden", "mlp"), output="r1"),)),
)
#: Experts in place of the MLP. Nothing applies R3 to the input of their down_proj.
MIXTURE = replace(
    LLAMA,
    experts="mlp.experts",
    router="mlp.gate",
    groups=(
        *LLAMA.groups[:2],
        InputGroup(
            name="mlp",
            norm="post_attention_layernorm",
            linears=(
                LinearSpec("mlp.experts.gate_up_proj", ("expert", "hidden"), input="r1", part="gate_proj"),
                LinearSpec("mlp.experts.gate_up_proj", ("expert", "hidden"), input="r1", part="up_proj"),
            ),
            routed=True,
        ),
        InputGroup(
            name="down",
            linears=(
                LinearSpec("mlp.experts.down_proj", ("hidden", "expert"), output="r1", part="down_proj"),
            ),
            routed=True,
        ),
    ),
    kinds=(("dense", replace(LLAMA, groups=(*LLAMA.groups[:2], *DENSE_MLP))),),
    expert_files=(
        ("gate_proj", "mlp.experts.{}.gate_proj.weight"),
        ("up_proj", "mlp.experts.{}.up_proj.weight"),
        ("down_proj", "mlp.experts.{}.down_proj.weight"),
    ),
    router_file="mlp.gate.weight",
)


#: LayerNorms with a shift, an MLP without gate that is no module of its own, learned positions, and heads
#: that share no keys. Its activation fixes the order of fc2's inputs but for permutations.
OPT = Family(
    models="OPT",
    layer_norm=True,
    attention="self_attn",
    mlp_front=("fc1", "activation_fn"),
    mlp="fc2",
    residual_dropout="dropout",
    layers="model.decoder.layers",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    required=(
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
        ("enable_bias", True),
    ),
    groups=(
        InputGroup(
            name="attention",
            norm="self_attn_layer_norm",
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
            norm="final_layer_norm",
            linears=(LinearSpec("fc1", ("mlp", "hidden"), input="r1"),),
        ),
        InputGroup(name="down", linears=(LinearSpec("fc2", ("hidden", "mlp"), output="r1"),)),
    ),
)


def with_shared_experts(family: Family, path: str, gate: str | None = None) -> Family:
    """The mixture with experts at `path` that read all tokens. They are pruned after the others, so that
    with `target="dense"` their outputs make up for the errors of the others.

    gate: the module whose sigmoid multiplies their outputs.
    """
    mlp = InputGroup(
        name="shared",
        norm="post_attention_layernorm",
        linears=(
            LinearSpec(f"{path}.gate_proj", ("shared", "hidden"), input="r1"),
            LinearSpec(f"{path}.up_proj", ("shared", "hidden"), input="r1"),
        ),
    )
    down = LinearSpec(f"{path}.down_proj", ("hidden", "shared"), output="r1")
    shared = InputGroup(name="shared_down", linears=(down,), weighted=gate is not None)
    unpruned = () if gate is None else ((gate, "post_attention_layernorm"),)
    return replace(family, groups=(*family.groups, mlp, shared), unpruned=(*family.unpruned, *unpruned))


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


#: A latent attention (MLA): R1 rotates what reads the stream and what writes it. Norms of the latents follow,
#: and a head's values lie between its keys in one linear, which no R2 rotates here.
LATENT_ATTENTION = (
    InputGroup(
        name="attention",
        norm="input_layernorm",
        linears=(
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
    return replace(
        family,
        groups=(*LATENT_ATTENTION, *family.groups[2:]),
        untouched=("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
        kinds=tuple((kind, latent(one)) for kind, one in family.kinds),
    )


def hybrid(family: Family, inputs: dict[str, Width], unpruned: tuple[str, ...]) -> Family:
    """The family with GATED_ATTENTION, some of whose layers have a linear attention instead (Gated DeltaNet).

    Its norms multiply by 1 + γ. Behind its linears a linear attention has a convolution, norms of each head
    and a gate, so that no R2 passes.

    inputs: linear of the linear attention → the width of its outputs. unpruned: its linears with one or two
        outputs for each head, which are rotated alone.
    """
    family = replace(
        family,
        norm_offset=1.0,
        groups=(*GATED_ATTENTION, *family.groups[2:]),
        kinds=tuple(
            (kind, replace(one, norm_offset=1.0, groups=(*GATED_ATTENTION, *one.groups[2:])))
            for kind, one in family.kinds
        ),
    )
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

    kinds = [("linear", linear(family)), *((f"linear {kind}", linear(one)) for kind, one in family.kinds)]
    return replace(family, kinds=(*family.kinds, *kinds))


#: `model_type` of a config.json → family
FAMILIES = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, models="Mistral"),
    "ministral3": replace(LLAMA, models="Ministral 3"),
    "qwen2": replace(LLAMA, models="Qwen2, Qwen2.5"),
    "qwen3": replace(LLAMA, models="Qwen3"),
    "smollm3": replace(LLAMA, models="SmolLM3"),
    "seed_oss": replace(LLAMA, models="Seed-OSS", mlp_dropout="residual_dropout"),
    # its multipliers of the embedding, of the attention's scores and of the logits commute with rotations
    "granite": replace(
        LLAMA, models="Granite 3", residual_multiplier="residual_multiplier", logits_divisor="logits_scaling"
    ),
    "phi3": replace(
        LLAMA.with_fused("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")).with_fused(
            "mlp.gate_up_proj", ("gate_proj", "up_proj")
        ),
        models="Phi-3, Phi-3.5, Phi-4",
        activation="activation_fn",
        residual_dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
    ),
    "glm4": replace(
        _inside(LLAMA).with_fused("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        models="GLM-4",
        activation="activation_fn",
        post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "olmo2": replace(POST_NORM, models="OLMo 2"),
    "olmo3": replace(POST_NORM, models="OLMo 3"),
    "exaone4": replace(POST_NORM, models="EXAONE 4"),
    "gemma2": replace(SANDWICH, models="Gemma 2"),
    "gemma3_text": replace(SANDWICH, models="Gemma 3"),
    "cohere2": replace(
        _with_norms(LLAMA, "input_layernorm", "input_layernorm"),
        models="Command R7B, Command A",
        layer_norm=True,
        parallel=True,
        logits_multiplier="logit_scale",
    ),
    "opt": OPT,
    "qwen3_moe": replace(MIXTURE, models="Qwen3 MoE"),
    "qwen2_moe": replace(
        with_shared_experts(MIXTURE, "mlp.shared_expert", "mlp.shared_expert_gate"), models="Qwen2 MoE"
    ),
    "qwen3_next": replace(
        hybrid(
            with_shared_experts(MIXTURE, "mlp.shared_expert", "mlp.shared_expert_gate"),
            {"in_proj_qkvz": "linear_qkvz"},
            ("in_proj_ba",),
        ),
        models="Qwen3-Next",
    ),
    "qwen3_5_text": replace(
        hybrid(LLAMA, {"in_proj_qkv": "linear_qkv", "in_proj_z": "linear_value"}, ("in_proj_b", "in_proj_a")),
        models="Qwen3.5",
    ),
    "qwen3_5_moe_text": replace(
        hybrid(
            replace(with_shared_experts(MIXTURE, "mlp.shared_expert", "mlp.shared_expert_gate"), kinds=()),
            {"in_proj_qkv": "linear_qkv", "in_proj_z": "linear_value"},
            ("in_proj_b", "in_proj_a"),
        ),
        models="Qwen3.5 MoE",
    ),
    "glm4_moe": replace(
        with_shared_experts(MIXTURE, "mlp.shared_experts"), models="GLM-4.5, GLM-4.6, GLM-4.7"
    ),
    "deepseek_v3": replace(
        latent(with_shared_experts(MIXTURE, "mlp.shared_experts")), models="DeepSeek-V3, DeepSeek-R1"
    ),
    "gpt_oss": replace(
        MIXTURE.with_transposed_experts(),
        models="gpt-oss",
        gated="_apply_gate",
        router="mlp.router",
        expert_files=(),
        router_file="mlp.router.weight",
        kinds=(),
    ),
    "mixtral": replace(
        MIXTURE,
        models="Mixtral",
        expert_files=(
            ("gate_proj", "block_sparse_moe.experts.{}.w1.weight"),
            ("up_proj", "block_sparse_moe.experts.{}.w3.weight"),
            ("down_proj", "block_sparse_moe.experts.{}.w2.weight"),
        ),
        router_file="block_sparse_moe.gate.weight",
    ),
}


def family_of(config: Any) -> Family:
    """The family of a model with `config`, with the groups of each of its experts.

    Raises UserError for a model type that is not in FAMILIES, and for a config that its entry excludes.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise UserError(
            f"model type {model_type!r} is not supported: expected one of {', '.join(FAMILIES)}; "
            "drot info MODEL names what drot cannot place in it"
        )
    for name, value in FAMILIES[model_type].required:
        if (got := getattr(config, name, value)) != value:
            raise UserError(
                f"a model of type {model_type!r} must have {name}={value} in its config, got {got}"
            )
    return _with_experts(FAMILIES[model_type], experts_of(config))


def layer_families(config: Any, layers: int) -> list[Family]:
    """The declaration of each of `layers` decoder layers of a model with `config`.

    Raises UserError as `family_of`.
    """
    family = family_of(config)
    kinds = dict(family.kinds)
    of_layers = (layer_kind(config, index) for index in range(layers))
    count = experts_of(config)
    return [_with_experts(kinds[kind], count) if kind else family for kind in of_layers]


def linear_names(config: Any) -> Iterator[tuple[str, LinearSpec]]:
    """The full name and the declaration of each linear of a model with `config`."""
    for index, family in enumerate(layer_families(config, config.num_hidden_layers)):
        for linear in family.linears:
            yield family.full_name(index, linear), linear


@functools.cache
def _with_experts(family: Family, count: int) -> Family:
    return family if family.experts is None else family.with_experts(count)
