"""The rotations that a decoder layer applies while a model runs: at its boundary, and before down_proj.

A boundary is the place between two decoder layers that have different bases (paper, section 4.3).

The rotations of layers l and l + 1 merge into one matrix Q = R1(l)ᵀ R1(l+1) [d, d]. It has one of two places:

| place    | held by layer | the layer computes                              | down_proj of layer l takes |
|----------|---------------|-------------------------------------------------|----------------------------|
| input    | l + 1         | h ← h Q, then its stock forward                 | R1(l)                      |
| residual | l             | y = r Q + MLP(r), r the residual before the MLP | R1(l+1)                    |

The weight γ of a norm behind attention or MLP does not commute with rotations, so that nothing can rotate the
stream of a family with such norms without two products of its own in each layer. There the stream stays in
its original basis, and the place `inside` spends the same two products on the inputs, with Q = R1(l):

| place    | held by layer | the layer computes                                                             |
|----------|---------------|--------------------------------------------------------------------------------|
| inside   | l             | r = h + n₂(attention(n₁(h) Q)), y = r + n₄(MLP(n₃(r) Q)), with the norms n     |

Gemma 4 has experts beside the MLP, which read n₅(r) Q.

Cohere's MLP reads what its attention reads: y = r Q + MLP(n(h)), with r as before. The two blocks have one
norm, which is renamed below if either of them holds a rotation.

Granite multiplies the outputs of its attention and of its MLP by a number before it adds them; so does y.
Gemma 4 multiplies y by a number, in front of which its smaller models add an embedding of each token.

The product r Q does not depend on the MLP. So it can be computed at the same time, or in one operation with
the MLP's last product (drot/sparse/fused.py).

In front of down_proj the MLP multiplies by R3 = blockdiag(B1 … Bn), a ← a R3, and down_proj has W R3. In a
mixture each expert has its own blocks, and so have the experts that read all tokens.

A layer that holds Q has its attention norm under another name, `rotated_input_layernorm`, and a layer that
holds R3 the norm of its MLP. A program that reads a checkpoint as a stock model of its family then lacks a
tensor in each of these layers. It cannot compute with weights of another basis.
"""

import inspect
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from drot.config import BoundaryPlace
from drot.core.errors import UserError
from drot.machine.products import without_autocast
from drot.model.block_rotation import DOWN_ROTATION, BlockRotation
from drot.model.experts import fit_experts
from drot.model.family import EMBEDDED, Family
from drot.model.mixins import Mixin, mix, unmix
from drot.model.one_op import GatedMLP

#: Name of the module in a decoder layer that holds Q, also in the tensor names of a checkpoint.
ROTATION_MODULE = "residual_rotation"
#: Prefix of the name of a norm in a decoder layer that holds Q or R3.
NORM_PREFIX = "rotated_"
#: Arguments of a layer that its linear attention, convolution or Mamba takes as well, and the names of the
#: cache, of which all but `cache` are those of older versions of transformers.
LINEAR_ARGUMENTS = ("attention_mask", "cu_seq_lens_q", "seq_idx")
CACHES = ("cache", "past_key_values", "cache_params")
#: vectors with which `check_rotations` probes a rotation
PROBES = 4
#: largest ‖QᵀQx - x‖ / ‖x‖ of a rotation in fp32; rounding gives about 1e-7
FP32_TOLERANCE = 1e-3


class RotateAndAdd(nn.Module):
    """forward(residual, x) = residual · Q + m (x · W_downᵀ + b), with x the input of down_proj.

    m is the number by which the layer multiplies the output of its MLP; 1 in most families.

    Base class of modules that rotate the residual and also compute down_proj. down_proj then returns its
    input x unchanged.
    """


class RotatedLayer(Mixin):
    """Mixin in front of a family's class of decoder layers, for a layer that holds Q, R3 or both.

    place `input`: h ← h Q, then the stock forward. The places `residual` and `inside` replace the stock
    forward, in whose middle Q acts. Every family in model/families.py has its form: attention,
    then MLP, each with the norms of the declaration, and outputs that are added as it says. R3 is applied by
    the MLP, which is a GatedMLP, or by the experts.

    transformers has no registry for the classes of decoder layers: the code of each model names its own. So
    `add_boundary_rotation` and `add_down_rotation` change the class of a layer.

    renamed: the stock names of the norms that have NORM_PREFIX; the forward finds the norms under them.
    cache_argument: the name that its linear attention has for the cache, of CACHES.
    """

    family: Family
    training: bool
    renamed: tuple[str, ...]
    boundary_place: BoundaryPlace | None = None
    cache_argument: str = CACHES[0]
    residual_rotation: nn.Module

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for norm in cls.renamed:
            setattr(cls, norm, _at(NORM_PREFIX + norm))

    def forward(self, hidden_states: Tensor, *embedded: Tensor | None, **kwargs: Any) -> Any:
        """hidden_states h [batch, length, d] -> what the stock forward returns.

        embedded: EMBEDDED, which Gemma 4 gives without its name; None if the model has no such embeddings.
        """
        if self.boundary_place in (None, "input"):
            if self.boundary_place == "input":
                hidden_states = self.residual_rotation(hidden_states)
            return super().forward(hidden_states, *embedded, **kwargs)  # type: ignore[misc]
        of_tokens = embedded[0] if embedded else kwargs.pop(EMBEDDED, None)
        family = self.family
        residual, chosen = hidden_states, ()
        out = read = self._read(hidden_states, 0)
        if family.attention is not None:
            out, chosen = self._attended(family.attention, read, kwargs)
        if not family.one_block:
            residual = hidden_states + self._added(out, 0)
            read = read if family.parallel else self._read(residual, 1)
        if family.attention != family.mlp:
            out = read
            for name in (*family.mlp_front, family.mlp):
                out = getattr(self, name)(out)
        if isinstance(out, tuple):  # gpt-oss returns the scores of the router too
            out = out[0]
        if family.experts_beside is not None:
            out = self._with_experts(out, residual)
        if family.beside is not None and (beside := getattr(self, family.beside)) is not None:
            out = out + beside(read)
        if self.boundary_place == "inside":
            output = residual + self._added(out, 1)
            if family.embedded is not None and of_tokens is not None:
                output = output + self._embedded(output, of_tokens)
            if family.output_multiplier is not None:
                output *= getattr(self, family.output_multiplier)  # in place, in the dtype of the stream
            return output
        if isinstance(self.residual_rotation, RotateAndAdd):
            output = self.residual_rotation(residual, out)
        else:
            output = self.residual_rotation(residual) + self._added(out, 1)
        return (output, *chosen) if chosen else output

    def _attended(self, attention: str, read: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The output of the attention, and the tokens that its indexer chose (`Family.returns_choice`)."""
        family = self.family
        if family.linear_attention:
            own = dict.fromkeys(CACHES, self.cache_argument) | {name: name for name in LINEAR_ARGUMENTS}
            kwargs = {own[name]: each for name, each in kwargs.items() if name in own}
        found = getattr(self, attention)(hidden_states=read, **kwargs)
        if family.linear_attention:
            return found, ()
        return found[0], found[2:] if family.returns_choice else ()

    def _read(self, residual: Tensor, block: int) -> Tensor:
        """What the attention, block 0, or the MLP, 1, reads of the residual."""
        family = self.family
        if family.norms:
            residual = getattr(self, family.block_norms[block])(residual)
        return self._turned(residual)

    def _turned(self, read: Tensor) -> Tensor:
        """What a block reads, in the basis of its linears."""
        return self.residual_rotation(read) if self.boundary_place == "inside" else read

    def _with_experts(self: Any, out: Tensor, residual: Tensor) -> Tensor:
        """The output of the MLP and that of the experts beside it (`Family.experts_beside`)."""
        router, before, behind_mlp, behind = (getattr(self, name) for name in self.family.experts_beside)
        tokens = residual.flatten(0, -2)
        _, weights, chosen = router(tokens)
        found = getattr(self, self.family.experts)(self._turned(before(tokens)), chosen, weights)
        added: Tensor = behind_mlp(out) + behind(found.view_as(residual))
        return added

    def _embedded(self: Any, residual: Tensor, of_tokens: Tensor) -> Tensor:
        """What the layer adds for its own embeddings of the tokens (`Family.embedded`)."""
        gate, activation, projection, norm = (getattr(self, name) for name in self.family.embedded)
        added: Tensor = norm(projection(activation(gate(residual)) * of_tokens))
        return added

    def _added(self, output: Tensor, block: int) -> Tensor:
        """What the layer adds to its residual for the output of the attention, block 0, or of the MLP, 1."""
        family = self.family
        if family.post_norms is not None:
            output = getattr(self, family.post_norms[block])(output)
        if family.residual_dropouts is not None:
            output = getattr(self, family.residual_dropouts[block])(output)
        if family.residual_dropout is not None:
            output = nn.functional.dropout(output, getattr(self, family.residual_dropout), self.training)
        return (
            output
            if family.residual_multiplier is None
            else output * getattr(self, family.residual_multiplier)
        )


def _at(name: str) -> property:
    return property(lambda layer: getattr(layer, name))  # torch.compile knows no attrgetter here


def _fit_class(layer: Any, family: Family) -> None:
    """Gives NORM_PREFIX to the norms of a decoder layer whose blocks hold a rotation, takes it from the
    others, and gives the layer the class that fits."""
    with_r3 = (hasattr(attrgetter(path)(layer), DOWN_ROTATION) for path in family.down_modules)
    held = hasattr(layer, ROTATION_MODULE), any(with_r3)
    wanted = {norm for norm, holds in zip(family.block_norms, held, strict=True) if holds}
    before: set[str] = set()
    if isinstance(layer, RotatedLayer):
        before = set(layer.renamed)
        unmix(layer)
    names = {norm: NORM_PREFIX + norm for norm in wanted - before}
    names |= {NORM_PREFIX + norm: norm for norm in before - wanted}
    modules = {new: getattr(layer, name) for name, new in names.items()}
    for name in names:
        delattr(layer, name)
    if wanted:
        mix(layer, RotatedLayer, family=family, renamed=tuple(sorted(wanted)))
    for name, module in modules.items():
        setattr(layer, name, module)


def rotation_place(layer: object) -> BoundaryPlace | None:
    """The place of the boundary matrix that a decoder layer holds, if it holds any."""
    return layer.boundary_place if isinstance(layer, RotatedLayer) else None


def down_rotations(layer: object) -> list[BlockRotation]:
    """The parts of R3 that a decoder layer holds, of all experts and of an MLP; none without R3."""
    if not isinstance(layer, RotatedLayer):
        return []
    modules = (attrgetter(path)(layer) for path in layer.family.down_modules)
    return [getattr(module, DOWN_ROTATION) for module in modules if hasattr(module, DOWN_ROTATION)]


def add_down_rotation(
    layer: Any,
    family: Family,
    blocks: Mapping[str, int],
    size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[BlockRotation]:
    """Adds an uninitialised R3 to a decoder layer, and returns its parts.

    An MLP becomes a GatedMLP, a module of experts a ReplacedExperts, and the layer a RotatedLayer, whose
    norm of the MLP gets NORM_PREFIX.

    blocks: module whose down_proj takes R3 (`Family.down_modules`) → the number of its blocks.
    """
    added = []
    for path, count in blocks.items():
        mlp, rotation = attrgetter(path)(layer), BlockRotation(count, size, dtype=dtype, device=device)
        setattr(mlp, DOWN_ROTATION, rotation)
        if path == family.experts:
            fit_experts(mlp, family)
        elif not isinstance(mlp, GatedMLP):
            mix(mlp, GatedMLP, family=family, parts=family.mlp_parts(path))
        added.append(rotation)
    _fit_class(layer, family)
    return added


def remove_down_rotation(layer: Any) -> None:
    """Undoes `add_down_rotation`."""
    for path in layer.family.down_modules:
        mlp = attrgetter(path)(layer)
        delattr(mlp, DOWN_ROTATION)
        if path == layer.family.experts:
            fit_experts(mlp, layer.family)
        else:
            unmix(mlp)
    _fit_class(layer, layer.family)


def add_boundary_rotation(
    layer: Any,
    family: Family,
    place: BoundaryPlace,
    hidden_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Linear:
    """Adds an uninitialised rotation to a decoder layer as `layer.residual_rotation`, and returns it.

    The rotation is an nn.Linear [d, d] without bias, h → h Wᵀ, so its weight is Qᵀ. The layer becomes a
    RotatedLayer, and the name of its attention norm gets NORM_PREFIX.

    """
    # not initialised, which would draw from the caller's random numbers
    rotation = skip_init(nn.Linear, hidden_size, hidden_size, bias=False, dtype=dtype, device=device)
    rotation.requires_grad_(False)
    setattr(layer, ROTATION_MODULE, rotation)
    layer.boundary_place = place
    if family.linear_attention and family.attention is not None:
        taken = inspect.signature(getattr(layer, family.attention).forward).parameters
        layer.cache_argument = next(name for name in CACHES if name in taken)
    _fit_class(layer, family)
    return rotation


def remove_boundary_rotation(layer: Any) -> None:
    """Undoes `add_boundary_rotation`."""
    for added in (ROTATION_MODULE, "boundary_place"):
        delattr(layer, added)
    layer.__dict__.pop("cache_argument", None)
    _fit_class(layer, layer.family)


@torch.no_grad()
@without_autocast()
def check_rotations(module: nn.Module, path: str) -> None:
    """Raises UserError that names the first Q or R3 in `module`, a layer or all, that is not orthogonal.

    QᵀQ would take minutes for 80 layers of d = 8192 on a CPU. So ‖QᵀQx - x‖ / ‖x‖ is measured, in fp32, for
    PROBES random vectors x. A rotation that is offloaded to disk is not checked.

    path: the path of the module in its model, for the message.
    """
    for name, part in module.named_modules():
        if name.rpartition(".")[2] not in (ROTATION_MODULE, DOWN_ROTATION):
            continue
        q: Any = part.weight
        if q.is_meta:
            continue
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(q.shape[-1], PROBES, generator=generator, dtype=torch.float32).to(q.device)
        q32 = q.float()
        error = float(((q32.mT @ (q32 @ x) - x).norm(dim=-2) / x.norm(dim=-2)).amax())
        if not error < orthogonality_tolerance(q):  # error may be NaN
            raise UserError(
                f"{path}.{name}.weight must be orthogonal, got ‖QᵀQx - x‖ / ‖x‖ = {error:.1e}: the file is "
                "damaged; copy it again"
            )


def orthogonality_tolerance(q: Tensor) -> float:
    """The largest ‖QᵀQx - x‖ / ‖x‖ of an intact rotation `q` [..., d, d].

    It depends on the coarsest dtype that holds all elements exactly, because `q` may have a wider dtype than
    the file. Rounding gives about 1.6e-3 in bf16 and 2e-4 in fp16.
    """
    for dtype in (torch.bfloat16, torch.float16):
        if bool((q.to(dtype).to(q.dtype) == q).all()):
            return 2 * torch.finfo(dtype).eps
    return FP32_TOLERANCE
