"""Fused products of a packed model: one large product in place of several small ones.

Starting a product takes about as long as computing it for a few tokens, on a CPU too. `fuse` merges these
products in every decoder layer, where x is the input of the attention or of the MLP, r the residual beside
the MLP, Q its rotation (drot/model/boundary.py) and a the input of down_proj:

| before                   | fused product   | modules after `fuse`                                        |
|--------------------------|-----------------|-------------------------------------------------------------|
| x Wqᵀ, x Wkᵀ, x Wvᵀ      | x [Wq; Wk; Wv]ᵀ | q_proj: FusedLinear; k_proj, v_proj: FusedPart              |
| x Wgateᵀ, x Wupᵀ         | x [Wgate; Wup]ᵀ | gate_proj: FusedLinear; up_proj: FusedPart                  |
| r Q, a Wdownᵀ, their sum | r Q + a Wdownᵀ  | residual_rotation: FusedRotation; down_proj: DeferredLinear |

Phi-3 has x [Wq; Wk; Wv]ᵀ and x [Wgate; Wup]ᵀ as one module each, which stays.

The layer's own code does not change. It calls q_proj, k_proj and v_proj one after the other with the same x:
q_proj computes all columns, returns its own and keeps the others, which k_proj and v_proj then return.
down_proj returns its input a unchanged, so the MLP returns a, and the layer passes r and a to the rotation.

A product with a linear that is not packed is not fused, and neither are those of routed experts. The norms
and the gated activation become one op each (drot/model/one_op.py).

The state dict of a fused model has the names and shapes of the separate modules.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drot.model.boundary import RotateAndAdd, rotation_place
from drot.model.decoder import DecoderModel
from drot.model.family import InputGroup
from drot.model.layer import DecoderLayer
from drot.model.one_op import use_one_op, use_stock_ops
from drot.ops import sparse24_linear
from drot.sparse.linear import SparseLinear, in_dtype_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FusedLinear(SparseLinear):
    """Replaces the first of several linears with the same input x: x [W0; W1; ...]ᵀ + [b0; b1; ...].

    All have a bias, or none has.

    `forward` computes the product of all linears and returns the columns of the first. A FusedPart in the
    place of each other linear returns the columns of that linear.

    values, positions, bias: those of all linears, concatenated along the outputs.
    sizes: the number of outputs of each linear.
    """

    def __init__(self, linears: list[SparseLinear]) -> None:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        super().__init__(
            torch.cat([linear.values.detach() for linear in linears]),
            torch.cat([linear.positions.detach() for linear in linears]),
            torch.cat([bias.detach() for bias in biases]) if biases else None,
        )
        self.sizes = [linear.out_features for linear in linears]
        #: the last input and its outputs by linear, until the last linear's output was returned
        self.pending: tuple[Tensor | None, tuple[Tensor, ...]] = (None, ())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sizes[0]]. The other outputs are kept in `pending`."""
        outputs = super().forward(x).split(self.sizes, -1)
        self.pending = (x, outputs)
        return outputs[0]

    def part(self, x: Tensor, index: int) -> Tensor:
        """x [..., in] -> [..., sizes[index]], the output of linear `index`.

        The output comes from `pending` if the last product had the same x. Otherwise, as when another thread
        has replaced `pending`, it is computed alone.
        """
        source, outputs = self.pending
        if source is not x:
            return sparse24_linear(in_dtype_of(self.values, x), **self.rows(index))
        if index == len(self.sizes) - 1:
            self.pending = (None, ())  # frees the memory before the next forward pass
        return outputs[index]

    def rows(self, index: int) -> dict[str, Tensor]:
        """values, positions and, if there is one, bias of linear `index`, as views."""
        return {
            name: parameter.detach().split(self.sizes)[index] for name, parameter in self.named_parameters()
        }

    def linear(self, index: int) -> SparseLinear:
        """Linear `index` alone. It shares the memory of the fused weight."""
        return SparseLinear(**self.rows(index))

    def load_linear(self, index: int, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        """`_load_from_state_dict` of linear `index`."""
        _load_in_place(self.linear(index), state_dict, prefix, *rest)
        if self.keeps_compressed:
            self.compress()

    def _save_to_state_dict(self, *arguments: Any) -> None:
        self.linear(0)._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.load_linear(0, *arguments)


class FusedPart(nn.Module):
    """Replaces linear `index` > 0 of a FusedLinear, and returns its columns of the fused product."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self.fused = (fused,)  # a tuple, so that `fused` is not registered as a submodule a second time
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sizes[index]]."""
        return self.fused[0].part(x, self.index)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        self.fused[0].linear(self.index)._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.fused[0].load_linear(self.index, *arguments)


class FusedRotation(RotateAndAdd):
    """Replaces the rotation of the residual of the MLP: r Q + m (a Wᵀ + b), with W and b of down_proj.

    q is Q [d, d]. It lies by columns, as `sparse24_linear` reads it fastest, and shares the memory of Qᵀ, the
    weight of the linear that it replaces. The state dict holds Qᵀ. multiplier: m of the layer.
    """

    def __init__(self, rotation: nn.Linear, down: "DeferredLinear", multiplier: float) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.q = nn.Parameter(rotation.weight.detach().contiguous().T, requires_grad=False)
        self.down = (down,)  # a tuple, so that `down` is not registered as a submodule a second time

    def forward(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual r [..., d] and x = a [..., in], the input of down_proj -> r Q + m (a Wᵀ + b) [..., d].

        Under autocast, r and a are cast to the dtype of the weight.
        """
        (down,) = self.down
        x, residual = in_dtype_of(down.values, x), in_dtype_of(down.values, residual)
        bias: Tensor | None = down.bias
        if self.multiplier != 1:  # of a and b: the packed values stay as they are stored
            x, bias = x * self.multiplier, None if bias is None else bias * self.multiplier
        weight = (down.values, down.positions, bias)
        return sparse24_linear(x, *weight, residual, self.q, compressed=down.compressed)

    def linear(self) -> nn.Linear:
        """The rotation alone. It shares the memory of q."""
        size = self.q.shape[0]
        rotation = nn.Linear(size, size, bias=False, device="meta")
        rotation.weight = nn.Parameter(self.q.detach().T, requires_grad=False)
        return rotation

    def _save_to_state_dict(self, *arguments: Any) -> None:
        self.linear()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        _load_in_place(self.linear(), state_dict, prefix, *rest)


def _load_in_place(module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
    """Loads a module that shares the memory of a fused one.

    The metadata of the state dict are left out: they can ask for new tensors, which the fused one would lack.
    """
    module._load_from_state_dict(state_dict, prefix, {}, *rest)


class DeferredLinear(SparseLinear):
    """Replaces down_proj where a FusedRotation computes its product: holds the weight, returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> x, unchanged."""
        return x


@torch.no_grad()
def fuse(model: "PreTrainedModel") -> None:
    """Fuses the products of every decoder layer of a packed model, in place; see the table above.

    A model that is fused already stays as it is.
    """
    for layer in DecoderModel(model).layers:
        _fuse_layer(layer)


@contextlib.contextmanager
def fused_layer(layer: DecoderLayer) -> Iterator[None]:
    """A context in which a layer that is not fused computes as in a fused model."""
    _fuse_layer(layer)
    try:
        yield
    finally:
        _unfuse_layer(layer)


@torch.no_grad()
def _fuse_layer(layer: DecoderLayer) -> None:
    use_one_op(layer.module, layer.family)
    _fuse_rotation(layer)
    for group in _shared(layer):
        linears = [first for first, *_ in layer.modules_of(group)]
        modules = [linear.module for linear in linears]
        if len(linears) == 1 or not all(type(module) is SparseLinear for module in modules):
            continue
        if len({module.bias is None for module in modules}) > 1:  # some linears of a latent attention
            continue
        fused = FusedLinear(modules)
        linears[0].module = fused
        for index, linear in enumerate(linears[1:], 1):
            linear.module = FusedPart(fused, index)


def _shared(layer: DecoderLayer) -> list[InputGroup]:
    """The input groups that are not those of an expert."""
    return [group for group in layer.groups if group.expert is None]


def _fuse_rotation(layer: DecoderLayer) -> None:
    """Merges the rotation of the residual of the MLP with the product of down_proj."""
    rotated: Any = layer.module
    if not layer.is_mlp_end(layer.groups[-1]):  # the outputs of experts are added to it
        return
    if rotation_place(rotated) == "residual" and isinstance(rotated.residual_rotation, nn.Linear):
        (linear,) = layer.linears_of(layer.groups[-1])
        if isinstance(down := linear.module, SparseLinear):
            linear.module = DeferredLinear(down.values, down.positions, down.bias)
            rotated.residual_rotation = FusedRotation(
                rotated.residual_rotation, linear.module, layer.residual_multiplier
            )


def unfuse(model: "PreTrainedModel") -> None:
    """Undoes `fuse`, in place. A model that is not fused stays as it is."""
    for layer in DecoderModel(model).layers:
        _unfuse_layer(layer)


def _unfuse_layer(layer: DecoderLayer) -> None:
    use_stock_ops(layer.module, layer.family)
    for group in _shared(layer):
        linears = [first for first, *_ in layer.modules_of(group)]
        if isinstance(fused := linears[0].module, FusedLinear):
            for index, linear in enumerate(linears):
                linear.module = fused.linear(index)
    unfuse_rotation(layer)


def unfuse_rotation(layer: DecoderLayer) -> None:
    """Undoes the part of `fuse` that merges the rotation of a layer with down_proj, in place."""
    rotated: Any = layer.module
    if rotation_place(rotated) != "residual":
        return
    if isinstance(fused := rotated.residual_rotation, FusedRotation):
        (linear,) = layer.linears_of(layer.groups[-1])
        down = linear.module
        linear.module = SparseLinear(down.values, down.positions, down.bias)
        rotated.residual_rotation = fused.linear()
