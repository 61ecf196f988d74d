"""What a declaration of a model family can say: where its weights lie, and how rotations act on them."""

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from drot.model.sizes import Width

#: R1 [d, d] rotates the residual stream, R2 [head_dim, head_dim] the values of a KV head, R3 the input of
#: down_proj in diagonal blocks [b, b], which are others for each expert. Nothing in front of down_proj can
#: take R3, so that a model applies it while it runs (boundary.py), and a run may do without it. Where the
#: stream cannot rotate, R1 acts on the inputs of the attention and of the MLP, and the model applies it while
#: it runs too.
Rotates = Literal["r1", "r2", "r3"]

#: the argument of a layer that has an embedding table of its own: the embeddings of the tokens in that table
EMBEDDED = "per_layer_input"
#: the argument of a layer that holds keys and values of earlier layers: kind of attention → keys, values
LENT = "shared_kv_states"


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


def reads(path: str, width: Width, **others: Any) -> LinearSpec:
    """A linear with `width` outputs that reads the stream behind a norm. others: further fields."""
    return LinearSpec(path, (width, "hidden"), input="r1", **others)


def writes(path: str, width: Width, *, output: Rotates | None = "r1", **others: Any) -> LinearSpec:
    """A linear of `width` inputs whose outputs the layer adds to the stream. others: further fields."""
    return LinearSpec(path, ("hidden", width), output=output, **others)


def block(
    names: tuple[str, str],
    norm: str | None,
    readers: Iterable[LinearSpec],
    writer: LinearSpec,
    *,
    routed: bool = False,
) -> tuple[InputGroup, InputGroup]:
    """The two input groups of an attention, a Mamba or an MLP, with these names. routed: as in InputGroup."""
    first, last = names
    return (
        InputGroup(name=first, norm=norm, linears=tuple(readers), routed=routed),
        InputGroup(name=last, linears=(writer,), routed=routed),
    )


def alike(groups: Iterable[InputGroup]) -> list[list[InputGroup]]:
    """The groups in their order. Those of experts that do the same for each expert are together."""
    found: dict[str, list[InputGroup]] = {}
    for group in groups:
        name = group.name if group.expert is None else f"{group.name.rpartition('.')[0]} of experts"
        found.setdefault(name, []).append(group)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Family:
    """The parts of a Hugging Face causal language model and of its decoder layers, as dotted paths.

    models: the names of published models.
    groups: the input groups in the order of the forward pass, which is the order of the pruning.
    attention, mlp: the two blocks of a decoder layer. The layer adds the output of each to its residual
        stream. In a layer with one block `mlp` is its path, and `attention` too if it is an attention or a
        Mamba; otherwise `attention` is None.
    embedded: the names of four modules of a layer that has an embedding table of its own. Behind the MLP it
        multiplies the token's embedding, its argument EMBEDDED, by a gate, and adds a linear of the product
        to the stream. The modules are the linear of the gate, which reads the stream, the gate's activation,
        the linear of the product, and the norm of its outputs. Some models of a family have none.
    token_embeddings: the modules outside of the layers that hold these tables.
    beside: a module that reads what the MLP reads, and whose output the layer adds to that of the MLP. Some
        layers of a family have none.
    experts_beside: the names of four modules of a layer with `experts` beside its MLP, which read the stream
        too: the router, the norm in front of the experts, and the norms of the outputs of the MLP and of the
        experts, which the layer then adds.
    mlp_front: the modules of the MLP that the layer itself calls, one after the other, before it calls `mlp`.
    activation: the module of the MLP that acts on the outputs of the gate; None if that is a function, SiLU.
    gated: the method of the experts that makes the input of down_proj from the outputs of gate and up, which
        alternate; None if it is activation(gate) * up.
    mlp_dropout: the attribute of the MLP with the probability of the dropout of its outputs.
    residual_multiplier: the attribute of a layer with the number by which it multiplies the output of each
        block before it adds it; None if it only adds.
    output_multiplier: the attribute of a layer with the number by which it multiplies its output, behind
        `post_norms`; None if it does not.
    post_norms: the norms of the outputs of the attention and of the MLP, which the layer then adds.
    norm_offset: what the norms add to their weight before they multiply by it.
    layer_norm: whether the norms subtract the mean, so that only an R1 with R1 1 = 1 commutes with them.
    rms_norm: the attribute of the config that makes these norms RMSNorms where it is set.
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
    tied_elsewhere: whether vLLM, SGLang and llama.cpp take the embedding for lm_head, whatever config.json
        says.
    returns_choice: whether the attention and the layer also return the tokens that an indexer chose, which
        the next layer could read.
    in_fp32: what the names of tensors contain that transformers builds in fp32 in a model of any dtype,
        though its list of such tensors lacks them.
    untouched: modules with weights that a layer may have and that see nothing rotated.
    unpruned: path of a module with a weight [any, d] → path of the norm whose output it reads. It is rotated
        as the linears behind this norm are, and never pruned.
    experts: the module with the parameters [experts, out, in] of all experts, in a mixture of experts.
    router: the module with the weight [experts, d] that chooses the experts of a token. It reads what the
        experts read, and is `unpruned`.
    expert_files: part → the name in files of the weight of expert `{}` in a layer, where each lies by itself;
        empty if the files hold the parameters of all experts.
    swapped_in_files: whether they hold these parameters as [experts, in, out], with gate above up.
    body: what the names of tensors outside of the layers, and of the layers, begin with → what the files have
        in its place. The first that fits counts.
    files: the same of the tensors of a layer, by their names in the layer.
    parts: tensor of a layer → the names in files of its parts, which have as many rows each and lie one below
        the other.
    kinds: kind of a layer (`layer_kind`) → the declaration of such a layer, where it differs from this one. A
        family whose layers are all alike has none, whatever the config says.
    positions: the embedding of the positions, which is added to that of the tokens.
    required: attribute of the config → the value for which the declaration holds. Of a list, all its values.
    needs: a class in transformers.core_model_loading. A transformers without it is too old for the family: it
        stores the weights under other names than those of their modules, or loads them in other dtypes.
    """

    models: str
    groups: tuple[InputGroup, ...]
    attention: str | None
    mlp: str
    embedded: tuple[str, str, str, str] | None = None
    token_embeddings: tuple[str, ...] = ()
    beside: str | None = None
    experts_beside: tuple[str, str, str, str] | None = None
    mlp_front: tuple[str, ...] = ()
    activation: str | None = "act_fn"
    gated: str | None = None
    mlp_dropout: str | None = None
    residual_multiplier: str | None = None
    output_multiplier: str | None = None
    post_norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    layer_norm: bool = False
    rms_norm: str | None = None
    parallel: bool = False
    logits_divisor: str | None = None
    logits_multiplier: str | None = None
    logits_cap: str | None = None
    residual_dropouts: tuple[str, str] | None = None
    residual_dropout: str | None = None
    linear_attention: bool = False
    tied_elsewhere: bool = False
    returns_choice: bool = False
    in_fp32: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()
    unpruned: tuple[tuple[str, str], ...] = ()
    experts: str | None = None
    router: str | None = None
    expert_files: tuple[tuple[str, str], ...] = ()
    swapped_in_files: bool = False
    body: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    kinds: tuple[tuple[str, "Family"], ...] = ()
    required: tuple[tuple[str, Any], ...] = ()
    needs: str | None = None
    positions: str | None = None
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The linears of a decoder layer, in the order in which they are pruned."""
        return tuple(linear for group in self.groups for linear in group.linears)

    def with_linears(self, change: Callable[[LinearSpec], LinearSpec]) -> "Family":
        """The family with change(linear) in place of each linear of a layer."""
        groups = (replace(group, linears=tuple(map(change, group.linears))) for group in self.groups)
        return replace(self, groups=tuple(groups))

    def with_kinds(self, change: Callable[["Family"], "Family"]) -> "Family":
        """The family with change(declaration) in place of that of each other kind of its layers."""
        return replace(self, kinds=tuple((kind, change(one)) for kind, one in self.kinds))

    def with_fused(self, module: str, parts: Collection[str]) -> "Family":
        """The family whose linears `parts` are slices of one module, in the order of their declaration."""

        def fused(linear: LinearSpec) -> LinearSpec:
            return replace(linear, path=module, part=linear.name) if linear.name in parts else linear

        return self.with_linears(fused)

    def without(self, widths: Collection[Width]) -> "Family":
        """The family without the linears that have one of `widths`."""

        def kept(linears: Iterable[LinearSpec]) -> tuple[LinearSpec, ...]:
            return tuple(linear for linear in linears if not set(linear.shape) & set(widths))

        groups = (replace(group, linears=kept(group.linears)) for group in self.groups)
        found = replace(self, groups=tuple(group for group in groups if group.linears))
        return replace(found, embedded=None, token_embeddings=()) if "embedded" in widths else found

    def with_experts(self, count: int) -> "Family":
        """The family with the groups of `count` experts in place of the groups that stand for each of them.

        The groups of an expert follow each other.
        """
        groups: list[InputGroup] = []
        for routed, of_kind in itertools.groupby(self.groups, lambda group: group.routed):
            found = list(of_kind)
            groups += (one.of_expert(e) for e in range(count) for one in found) if routed else found
        return replace(self, groups=tuple(groups))

    def without_experts(self) -> "Family":
        """The family of a model none of whose layers has experts, if it has a kind of such layers."""
        kinds = dict(self.kinds)
        if (dense := kinds.pop("dense", None)) is None:
            return self
        others = (
            (kind.removesuffix(" dense"), one) for kind, one in kinds.items() if kind.endswith(" dense")
        )
        return replace(
            dense, models=self.models, needs=self.needs, required=self.required, kinds=tuple(others)
        )

    def takes(self, rotation: Rotates) -> bool:
        """Whether `rotation` acts on a linear of one of its layers."""
        layers = self, *dict(self.kinds).values()
        return any(rotation in linear.rotations for layer in layers for linear in layer.linears)

    def lacks(self, mode: str) -> list[Rotates]:
        """The rotations of a run in `mode` (RotationConfig) that act on no linear of the family."""
        if mode == "none":
            return []
        placed: dict[Rotates, bool] = {
            "r1": mode == "layer" or self.rotates_stream,
            "r2": self.takes("r2"),
            "r3": mode == "shared" or self.takes("r3"),  # stock has none in any family
        }
        return [rotation for rotation, found in placed.items() if not found]

    @property
    def one_block(self) -> bool:
        """Whether a layer has one block, and not an attention and an MLP."""
        return self.attention in (None, self.mlp)

    @property
    def rotates_stream(self) -> bool:
        """Whether R1 rotates the residual stream, and not only what a layer makes of it."""
        return any(linear.output == "r1" for linear in self.linears)

    @property
    def embeddings(self) -> tuple[str, ...]:
        """The embedding of the tokens and, if there is one, that of the positions."""
        return (self.embedding,) if self.positions is None else (self.embedding, self.positions)

    @property
    def front(self) -> tuple[str, ...]:
        """The modules with weights in front of the first layer."""
        return (*self.embeddings, *self.token_embeddings)

    @property
    def norms(self) -> tuple[str, ...]:
        """The paths of the norms in front of linears."""
        return tuple(dict.fromkeys(group.norm for group in self.groups if group.norm is not None))

    @property
    def readers(self) -> tuple[tuple[str, str], ...]:
        """`unpruned`, with the router. If no norm is in front of the MLP, the router reads the stream."""
        return self.unpruned if self.router is None else ((self.router, self.block_norms[1]), *self.unpruned)

    @property
    def down_modules(self) -> tuple[str, ...]:
        """The modules whose down_proj takes R3, in the order of its blocks: an MLP, all experts, or both."""
        paths = (linear.path for linear in self.linears if linear.input == "r3")
        return tuple(dict.fromkeys(path.rpartition(".")[0] for path in paths))

    def mlp_parts(self, mlp: str) -> tuple[tuple[str, ...], str]:
        """Of the MLP at a path: the modules that read its input, gate and up or one for both, and down_proj.

        They are paths in the MLP.
        """
        own = [linear for linear in self.linears if linear.path.startswith(f"{mlp}.")]
        names = {one.path.removeprefix(f"{mlp}."): one.writes_residual for one in own if one.expert is None}
        (output,) = (name for name, writes in names.items() if writes)
        return tuple(name for name in names if name != output), output

    @property
    def block_norms(self) -> tuple[str, str]:
        """The norm of the attention and the norm of the MLP: those in front of them, or else behind them."""
        if self.norms:
            return self.norms[0], self.norms[-1]
        assert self.post_norms is not None
        return self.post_norms

    def in_files(self, name: str) -> str:
        """The name in files of a tensor outside of the layers, or of the layers themselves."""
        return renamed(name, self.body)

    def name_in_files(self, name: str) -> str:
        """The name in files of a tensor of a layer. name: its name in the layer."""
        return renamed(name, self.files)

    def full_name(self, index: int, linear: LinearSpec) -> str:
        """The name by which patterns find a linear of decoder layer `index`: `layers.0.self_attn.q_proj`."""
        of_block, dot, _ = linear.path.partition(".")
        name = f"{of_block}.{linear.name}" if dot else linear.path
        if of_block == "experts":  # which its name begins with already
            name = linear.name
        return f"layers.{index}.{name}"


def renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """The name with what the first of `renames` that fits has in place of its beginning."""
    for own, stored in renames:
        if name.startswith(own):
            return stored + name.removeprefix(own)
    return name
