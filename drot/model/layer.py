"""The handles to a decoder layer and its linears, which the rest of drot passes on.

They hold nothing but the Hugging Face module and the declaration of its family. So they can be made anew at
any time, and modules may be replaced behind them.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drot.config import BoundaryPlace
from drot.core.hashes import Ends
from drot.machine.memory import return_free_memory
from drot.machine.ranks import ALONE, Ranks
from drot.model.block_rotation import BlockRotation
from drot.model.boundary import add_boundary_rotation, add_down_rotation
from drot.model.dtypes import main_dtype
from drot.model.family import Family, InputGroup, LinearSpec, by_module
from drot.model.linear import Linear, copied, module_at, reset_norm, scale_of, shift_of
from drot.model.rotation import Boundary, LayerRotation, rotate_left, rotated_weight
from drot.model.sizes import HeadShape, Width, check_down_block

#: Gives the output of a block in place of the block.
Output = Callable[[], Tensor]


class Weights(Protocol):
    """Where the weights of a model lie whose parameters are on the device `meta`, such as in its files."""

    def read_layer(self, layer: "DecoderLayer", device: torch.device) -> None:
        """Brings the weights of `layer` to `device`."""

    def read_module(self, module: nn.Module, name: str) -> None:
        """Brings the weights of a module outside of the layers into main memory."""

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def ends(self, name: str, like: Tensor, sample: int) -> Ends:
        """The `sample` bytes at both ends of a tensor, in the dtype of `like`, which has its shape."""


class DecoderLayer:
    """One decoder layer.

    module: the Hugging Face module. index: its number, counted from 0.
    linears: name → linear, in the order in which they are pruned.
    route_all: whether the inputs of each expert are all tokens, and not those that the router sends there.
    weights: where the layer's weights are read from; None for a layer that has them.
    stored: what a checkpoint has for `family.layers` in the names of tensors, where it is not the same.
    prefix: what the names of the layer's tensors begin with there.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        family: Family,
        heads: HeadShape,
        widths: dict[Width, int],
        *,
        route_all: bool = False,
        weights: "Weights | None" = None,
        stored: str | None = None,
        stored_dtype: Callable[[str, torch.dtype], torch.dtype] = lambda name, dtype: dtype,
    ) -> None:
        self.module, self.index, self.family, self.heads = module, index, family, heads
        self.prefix = f"{stored or family.layers}.{index}."
        self._widths, self.route_all, self._weights = widths, route_all, weights
        self.stored_dtype = stored_dtype
        self.linears: dict[str, Linear] = {}
        starts: dict[tuple[str, int | None], int] = {}
        for group in self.groups:
            for spec in group.linears:
                start = starts.get((spec.path, spec.expert), 0)
                starts[spec.path, spec.expert] = stop = start + widths[spec.shape[0]]
                full_name, rows = family.full_name(index, spec), slice(start, stop)
                if spec.transposed:  # the slices of a parameter alternate
                    width = widths[spec.shape[0]]
                    count = sum(other.path == spec.path for other in group.linears)
                    rows = slice(start // width, None, count)
                self.linears[spec.name] = Linear(module, spec, group, full_name, rows)

    @property
    def groups(self) -> tuple[InputGroup, ...]:
        """The input groups, in the order of the forward pass."""
        return self.family.groups

    def linears_of(self, group: InputGroup) -> list[Linear]:
        return [self.linears[spec.name] for spec in group.linears]

    def modules_of(self, group: InputGroup) -> list[list[Linear]]:
        """The linears of a group by their module: one alone, or the slices of a fused module."""
        return [[self.linears[spec.name] for spec in specs] for specs in by_module(group.linears)]

    @property
    def modules(self) -> list[list[Linear]]:
        """The linears of the layer by their module, as `modules_of` gives them."""
        return [linears for group in self.groups for linears in self.modules_of(group)]

    @property
    def residual_multiplier(self) -> float:
        """The number by which the layer multiplies the output of each block before it adds it."""
        name = self.family.residual_multiplier
        return 1.0 if name is None else float(getattr(self.module, name))

    @property
    def downs(self) -> list[Linear]:
        """The linears whose input R3 rotates, in the order of its blocks."""
        return [linear for linear in self.linears.values() if linear.spec.input == "r3"]

    def down_inputs(self) -> int:
        """The number of inputs that R3 rotates, of all experts together in a mixture."""
        return sum(self.shape_of(linear.spec)[1] for linear in self.downs)

    @property
    def norms(self) -> list[Any]:
        """The norms in front of linears."""
        return [module_at(self.module, path) for path in self.family.norms]

    @property
    def post_norms(self) -> list[Any]:
        """The norms of the outputs of the attention and of the MLP."""
        return [module_at(self.module, path) for path in self.family.post_norms or ()]

    def adds(self, group: InputGroup) -> bool:
        """Whether the layer adds the outputs of `group` to its residual stream, and nothing changes them."""
        return group.writes_residual and not group.weighted and self.family.post_norms is None

    def zeros(self) -> tuple[int, int]:
        """The number of zeros, and of weights, of the linears."""
        weights = [linear.weight for linear in self.linears.values()]
        return sum(int((weight == 0).sum()) for weight in weights), sum(weight.numel() for weight in weights)

    @property
    def hidden_size(self) -> int:
        """The width d of the residual stream."""
        return self._widths["hidden"]

    def shape_of(self, spec: LinearSpec) -> tuple[int, int]:
        """The shape (out, in) of a linear by the config of the model."""
        outputs, inputs = spec.shape
        return self._widths[outputs], self._widths[inputs]

    # ---- where it lies -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return main_dtype(self.module.parameters())

    def to(self, device: torch.device) -> None:
        """Moves the layer. With `weights`, it drops them on the device `meta`, and reads them again after."""
        if self._weights is not None and self.device.type == "meta" != device.type:
            self._weights.read_layer(self, device)
        else:
            self.module.to(device)
        if device.type == "meta":
            return_free_memory()

    def tensors(self) -> Iterator[Tensor]:
        """The parameters and the buffers of the layer."""
        yield from self.module.parameters()
        yield from self.module.buffers()

    def copy(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> "DecoderLayer":
        module = copied(self.module, device or self.device, dtype)
        return DecoderLayer(
            module,
            self.index,
            self.family,
            self.heads,
            self._widths,
            route_all=self.route_all,
            stored_dtype=self.stored_dtype,
        )

    # ---- forward -------------------------------------------------------------------------------------

    def __call__(
        self,
        hidden: Tensor,
        kwargs: dict[str, Any],
        *,
        attention: Output | None = None,
        mlp: Output | None = None,
    ) -> Tensor:
        """The output of the layer.

        hidden: the input [sequences, seqlen, d].
        kwargs: the further arguments that the model gives its layer (`DecoderModel.record`).
        attention, mlp: what the block returns in place of its own output. The only block of a layer is `mlp`.
        """
        with contextlib.ExitStack() as replaced:
            family = self.family
            block = module_at(self.module, family.attention or family.mlp)
            if family.linear_attention and self.dtype == torch.float32:
                replaced.enter_context(_torch_functions(block))
            # what an attention returns behind its output
            beside = (None,) * (1 + family.returns_choice)
            if attention is not None:
                returned = attention if family.linear_attention else lambda: (attention(), *beside)
                replaced.enter_context(_returning(block, returned))
            if mlp is not None:
                of_mlp: Any = mlp()  # may call the very module
                if family.attention == family.mlp and not family.linear_attention:
                    of_mlp = of_mlp, *beside
                replaced.enter_context(_returning(module_at(self.module, family.mlp), lambda: of_mlp))
            output = self.module(hidden, **kwargs)
        stream: Tensor = output[0] if self.family.returns_choice else output
        return stream

    @property
    def attention_end(self) -> InputGroup | None:
        """The group whose outputs are the output of the attention; None where no other block follows it."""
        if self.family.one_block:
            return None
        return next(group for group in self.groups if group.writes_residual)

    def ends_layer(self, group: InputGroup) -> bool:
        """Whether the outputs of `group` are the output of the MLP, or a part of it in a mixture.

        In a layer with one block they are those of this block.
        """
        return group.writes_residual and group is not self.attention_end

    def is_mlp_end(self, group: InputGroup) -> bool:
        """Whether the outputs of `group` are the whole output of the MLP."""
        return self.ends_layer(group) and self.family.experts is None

    # ---- rotation ------------------------------------------------------------------------------------

    @torch.no_grad()
    def folded_weights(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Name → weight [out, in], with the weight of the norm in front of the linear folded in.

        Nothing is folded in a family whose stream cannot rotate: R1 acts behind the norm there.

        norm(h) · diag(γ) · Wᵀ = norm(h) · (W diag(γ))ᵀ. The norm that remains commutes with rotations (paper,
        algorithm 1, first step). The products are computed in fp64 and rounded to `dtype`.
        """
        return {linear.name: self._folded_weight(linear, dtype) for linear in self.linears.values()}

    def _folded_weight(self, linear: Linear, dtype: torch.dtype) -> Tensor:
        weight, norm = linear.weight.detach().double(), linear.group.norm
        if norm is not None and self.family.rotates_stream:
            weight = weight * scale_of(module_at(self.module, norm), self.family)
        return weight.to(dtype)

    def _folded_bias(self, linear: Linear, dtype: torch.dtype) -> Tensor | None:
        """The bias [out] of a linear, with the outputs W β of the shift of the norm in front of it added."""
        bias, norm = linear.bias, linear.group.norm
        if bias is None or norm is None or not self.family.rotates_stream:
            return None if bias is None else bias.to(dtype)
        shift = shift_of(module_at(self.module, norm))
        return (bias if shift is None else bias.double() + linear.weight.double() @ shift).to(dtype)

    def _rotate_readers(self, rotation: LayerRotation, dtype: torch.dtype) -> None:
        """Folds norms into what reads their outputs beside the linears, and rotates it."""
        for path, norm in self.family.readers:
            parameter = module_at(self.module, path).weight
            weight = parameter.detach().double()
            if self.family.rotates_stream:
                weight = weight * scale_of(module_at(self.module, norm), self.family)
            parameter.copy_(weight.to(dtype) @ rotation.r1)

    @torch.no_grad()
    def rotate(
        self,
        rotation: LayerRotation,
        boundary: Boundary | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        ranks: Ranks = ALONE,
    ) -> None:
        """Folds the norms and merges the rotation into the linears, in place. The layer then holds R3.

        boundary: of the residual. The layer then holds its matrix, and writes in the basis next_r1. Or that
            of the inside, which a family needs whose stream cannot rotate, unless R1 is the identity.
        dtype: of the products, which are computed from the original weights and rounded once. fp32 adds a
            relative error of 4e-7 to a weight; rounding to bf16 adds 2e-3.
        ranks: those that have the same layer. Each rotates its rows of the linears.
        """
        assert boundary is None or boundary.place != "input", "the next layer holds an input's boundary"
        device = self.device
        dtype = torch.promote_types(self.dtype, dtype)
        rotation = rotation.to(device, dtype)
        output_r1 = rotation.r1 if boundary is None else boundary.next_r1.to(device, dtype)
        for linear in self.linears.values():
            weight, folded_bias = self._folded_weight(linear, dtype), self._folded_bias(linear, dtype)
            r1 = output_r1 if self.ends_layer(linear.group) else rotation.r1
            if linear.spec.output == "r2":  # which mixes rows
                linear.weight.copy_(rotated_weight(linear.spec, weight, rotation, self.heads, r1))
            else:
                rows = ranks.share(len(weight))
                own = rotated_weight(linear.spec, weight, rotation, self.heads, r1, rows)
                linear.weight[rows].copy_(own)
                ranks.gather_rows_(linear.weight)
            if (bias := linear.bias) is not None and folded_bias is not None:
                if linear.spec.output == "r2":
                    folded_bias = rotate_left(rotation.r2, folded_bias[:, None])[:, 0]
                elif linear.spec.output == "r1":
                    folded_bias = folded_bias @ r1
                bias.copy_(folded_bias)
        self._rotate_readers(rotation, dtype)
        for norm in self.norms if self.family.rotates_stream else ():
            reset_norm(norm, self.family)
        if rotation.r3 is not None:
            parts = self.expect_down_rotation(rotation.r3.shape[-1])
            for part, r3 in zip(parts, rotation.r3.split([len(one.weight) for one in parts]), strict=True):
                part.weight.copy_(r3)
        if boundary is not None:
            self.hold(boundary, ranks)

    @torch.no_grad()
    def hold(self, boundary: Boundary, ranks: Ranks = ALONE) -> None:
        """Lets the layer apply the matrix of `boundary`, in the dtype and on the device of its weights.

        ranks: as in `rotate`.
        """
        matrix = boundary.to(self.device).matrix(ranks)
        self.expect_boundary(boundary.place).weight.copy_(matrix.T)

    def expect_boundary(self, place: BoundaryPlace) -> nn.Linear:
        """Lets the layer apply a boundary matrix Q, whose uninitialised weight Qᵀ [d, d] it returns."""
        size = self._widths["hidden"]
        return add_boundary_rotation(
            self.module, self.family, place, size, dtype=self.dtype, device=self.device
        )

    def apply_boundary(self, place: BoundaryPlace | None) -> None:
        """Where the layer applies the boundary matrix that it holds; None lets it compute without."""
        module: Any = self.module
        module.boundary_place = place

    def expect_down_rotation(self, size: int) -> list[BlockRotation]:
        """Lets the layer apply an R3 of blocks of `size`, whose parts it returns uninitialised.

        Raises UserError for blocks that do not divide the inputs of a down_proj.
        """
        blocks = dict.fromkeys(self.family.down_modules, 0)
        for linear in self.downs:
            check_down_block(size, width := self.shape_of(linear.spec)[1])
            blocks[linear.spec.path.rpartition(".")[0]] += width // size
        return add_down_rotation(self.module, self.family, blocks, size, dtype=self.dtype, device=self.device)


@contextlib.contextmanager
def _torch_functions(module: nn.Module) -> Iterator[None]:
    """A context in which the code of `module` calls its functions of torch.

    transformers replaces them by those of the package fla where it is installed, which refuse fp32.
    """
    names = vars(sys.modules[type(module).__module__])
    wrapped = {name: value for name, value in names.items() if name.startswith("torch_") and callable(value)}
    names.update({name: inspect.unwrap(value) for name, value in wrapped.items()})
    try:
        yield
    finally:
        names.update(wrapped)


@contextlib.contextmanager
def _returning(module: nn.Module, value: Callable[[], Any]) -> Iterator[None]:
    """A context in which a call of `module` returns value()."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda *args, **kwargs: value()
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before
