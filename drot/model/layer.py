"""The handles to a decoder layer and its linears, which the rest of drot passes on.

They hold nothing but the Hugging Face module and the declaration of its family. So they can be made anew at
any time, and modules may be replaced behind them.
"""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drot.config import BoundaryPlace
from drot.core.errors import UserError
from drot.model.boundary import add_boundary_rotation
from drot.model.families import Family, HeadShape, InputGroup, LinearSpec, Width
from drot.model.rotation import Boundary, LayerRotation, rotate_left, rotated_weight


def module_at(root: nn.Module, path: str) -> Any:
    """The submodule of `root` at a dotted path. Raises UserError if there is none."""
    try:
        return attrgetter(path)(root)
    except AttributeError:
        raise UserError(
            f"{type(root).__name__} has no module {path!r}, which drot/model/families.py lists: load the "
            "model again if it was changed after loading, or correct the entry of its model type"
        ) from None


class Linear:
    """One linear of a decoder layer: an nn.Linear, or the rows of a fused nn.Linear.

    full_name: such as `layers.0.self_attn.q_proj`. rows: its rows of the module's weight.
    """

    def __init__(
        self, layer: nn.Module, spec: LinearSpec, group: InputGroup, full_name: str, rows: slice
    ) -> None:
        self._layer, self.spec, self.group, self.full_name, self.rows = layer, spec, group, full_name, rows

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def module(self) -> Any:
        """The module that computes the linear now: an nn.Linear, or what replaced it."""
        return module_at(self._layer, self.spec.path)

    @module.setter
    def module(self, module: nn.Module) -> None:
        self._layer.set_submodule(self.spec.path, module)

    @property
    def plain(self) -> nn.Linear:
        """The module, if it is a plain nn.Linear. Raises UserError otherwise."""
        if not isinstance(module := self.module, nn.Linear):
            raise UserError(
                f"{self.spec.path} must be a plain torch.nn.Linear, got {type(module).__name__}: "
                "load the model unquantised, without adapters"
            )
        return module

    @property
    def weight(self) -> Tensor:
        """The weight [out, in]: the parameter, or a view of its rows."""
        weight = self.plain.weight
        return weight if self.spec.part is None else weight[self.rows]

    @property
    def bias(self) -> Tensor | None:
        bias = self.plain.bias
        return bias if self.spec.part is None or bias is None else bias[self.rows]


class Captured(NamedTuple):
    """What a forward pass of a layer saw up to the input of a group.

    input: the input [sequences, seqlen, in] of the group.
    residual: the residual stream [sequences, seqlen, d] in front of the attention.
    attended: the output [sequences, seqlen, d] of the attention; None if it was not computed.
    """

    input: Tensor
    residual: Tensor
    attended: Tensor | None


class _Stop(Exception):
    """Ends a forward pass."""


#: Gives the output of a block in place of the block.
Output = Callable[[], Tensor]


class DecoderLayer:
    """One decoder layer.

    module: the Hugging Face module. index: its number, counted from 0.
    linears: name → linear, in the order in which they are pruned.
    """

    def __init__(
        self, module: nn.Module, index: int, family: Family, heads: HeadShape, widths: dict[Width, int]
    ) -> None:
        self.module, self.index, self.family, self.heads = module, index, family, heads
        self._widths = widths
        self.linears: dict[str, Linear] = {}
        starts: dict[str, int] = {}
        for group in self.groups:
            for spec in group.linears:
                start = starts.get(spec.path, 0)
                starts[spec.path] = stop = start + widths[spec.shape[0]]
                full_name = family.full_name(index, spec)
                self.linears[spec.name] = Linear(module, spec, group, full_name, slice(start, stop))

    @property
    def groups(self) -> tuple[InputGroup, ...]:
        """The input groups, in the order of the forward pass."""
        return self.family.groups

    def linears_of(self, group: InputGroup) -> list[Linear]:
        return [self.linears[spec.name] for spec in group.linears]

    @property
    def norms(self) -> list[Any]:
        return [module_at(self.module, path) for path in self.family.norms]

    @property
    def modules_of_linears(self) -> list[nn.Linear]:
        """The modules of the linears, each once."""
        return list(dict.fromkeys(linear.plain for linear in self.linears.values()))

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
        return next(self.module.parameters()).dtype

    def to(self, device: torch.device) -> None:
        self.module.to(device)

    def copy(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> "DecoderLayer":
        module = copy.deepcopy(self.module).to(device=device, dtype=dtype)
        return DecoderLayer(module, self.index, self.family, self.heads, self._widths)

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
        attention, mlp: what the block returns in place of its own output.
        """
        with contextlib.ExitStack() as replaced:
            if attention is not None:
                block = module_at(self.module, self.family.attention)
                replaced.enter_context(_returning(block, lambda: (attention(), None)))
            if mlp is not None:
                replaced.enter_context(_returning(module_at(self.module, self.family.mlp), mlp))
            output: Tensor = self.module(hidden, **kwargs)
        return output

    def capture(
        self, hidden: Tensor, kwargs: dict[str, Any], group: InputGroup, *, attention: Output | None = None
    ) -> Captured:
        """The input of `group`, from a forward pass that ends there. The arguments are those of a call."""
        seen: dict[str, Tensor] = {}

        def see_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen["input"] = args[0]
            raise _Stop

        (attention_end,) = self.linears_of(self.attention_end)
        with (
            module_at(self.module, self.family.first_norm).register_forward_pre_hook(
                lambda module, args: seen.update(residual=args[0])
            ),
            attention_end.module.register_forward_hook(
                lambda module, args, output: seen.update(attended=output)
            ),
            self.linears_of(group)[0].module.register_forward_pre_hook(see_input),
            contextlib.suppress(_Stop),
        ):
            self(hidden, kwargs, attention=attention)
        return Captured(seen["input"], seen["residual"], seen.get("attended"))

    @contextlib.contextmanager
    def reading(
        self,
        groups: Collection[InputGroup],
        read: Callable[[InputGroup, Tensor], None],
        *,
        folded: bool = False,
        to_end: bool = False,
    ) -> Iterator[Callable[[Tensor, dict[str, Any]], Tensor | None]]:
        """A context with a forward pass that calls `read` with the input of each of `groups`.

        folded: whether the inputs are those without the weights of norms, which a rotation folds into the
            linears.
        to_end: whether the pass goes on to the output of the layer. Otherwise it ends at the last of
            `groups`, and returns None.
        """
        remaining: set[str] = set()

        def hook(group: InputGroup, norm: Any) -> Callable[..., None]:
            def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                read(group, args[0] if norm is None else norm(args[0]))
                remaining.discard(group.name)
                if not remaining and not to_end:
                    raise _Stop

            return see

        def forward(hidden: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
            remaining.update(group.name for group in groups)
            with contextlib.suppress(_Stop):
                return self(hidden, kwargs)
            return None

        with contextlib.ExitStack() as hooks:
            for group in groups:
                module, norm = self.linears_of(group)[0].module, None
                if folded and group.norm is not None:
                    module = module_at(self.module, group.norm)
                    norm = copy.deepcopy(module)
                    reset_norm(norm)
                hooks.enter_context(module.register_forward_pre_hook(hook(group, norm)))
            yield forward

    @property
    def attention_end(self) -> InputGroup:
        """The group whose outputs are the output of the attention."""
        return next(group for group in self.groups if group.writes_residual)

    def ends_layer(self, group: InputGroup) -> bool:
        """Whether the outputs of `group` are the output of the MLP."""
        return group.writes_residual and group is not self.attention_end

    # ---- rotation ------------------------------------------------------------------------------------

    @torch.no_grad()
    def folded_weights(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Name → weight [out, in], with the weight of the norm in front of the linear folded in.

        norm(h) · diag(γ) · Wᵀ = norm(h) · (W diag(γ))ᵀ. The norm that remains commutes with rotations (paper,
        algorithm 1, first step). The products are computed in fp64 and rounded to `dtype`.
        """
        weights = {}
        for linear in self.linears.values():
            weight, norm = linear.weight.detach().double(), linear.group.norm
            if norm is not None:
                weight = weight * module_at(self.module, norm).weight.detach().double()
            weights[linear.name] = weight.to(dtype)
        return weights

    @torch.no_grad()
    def rotate(self, rotation: LayerRotation, boundary: Boundary | None = None) -> None:
        """Folds the norms and merges the rotation into the linears, in place.

        The products are computed in fp64 from the original weights and rounded once.

        boundary: of the residual. The layer then holds its matrix, and writes in the basis next_r1.
        """
        assert boundary is None or boundary.place == "residual", "the next layer holds an input's boundary"
        device = self.device
        rotation = rotation.to(device, torch.float64)
        output_r1 = rotation.r1 if boundary is None else boundary.next_r1.to(device).double()
        for name, weight in self.folded_weights(torch.float64).items():
            linear = self.linears[name]
            r1 = output_r1 if self.ends_layer(linear.group) else rotation.r1
            linear.weight.copy_(rotated_weight(linear.spec, weight, rotation, self.heads, r1))
            if (bias := linear.bias) is not None and linear.spec.output == "r2":
                bias.copy_(rotate_left(rotation.r2, bias.double()[:, None])[:, 0])
            elif bias is not None and linear.spec.output == "r1":
                bias.copy_(bias.double() @ r1)
        for norm in self.norms:
            reset_norm(norm)
        if boundary is not None:
            self.hold(boundary)

    @torch.no_grad()
    def hold(self, boundary: Boundary) -> None:
        """Lets the layer apply the matrix of `boundary`, in the dtype and on the device of its weights."""
        matrix = boundary.to(self.device).matrix()
        self.expect_boundary(boundary.place).weight.copy_(matrix.T)

    def expect_boundary(self, place: BoundaryPlace) -> nn.Linear:
        """Lets the layer apply a boundary matrix Q, whose uninitialised weight Qᵀ [d, d] it returns."""
        size = self._widths["hidden"]
        return add_boundary_rotation(
            self.module, self.family, place, size, dtype=self.dtype, device=self.device
        )


@torch.no_grad()
def reset_norm(norm: Any) -> None:
    """Sets the weight of a norm to 1, after it was folded into linears."""
    norm.weight.fill_(1.0)


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
