"""The rotation at the boundary of two decoder layers that have different bases (paper, section 4.3).

The rotations of layers l and l + 1 merge into one matrix Q = R1(l)ᵀ R1(l+1) [d, d]. It has one of two places:

| place    | held by layer | the layer computes                              | down_proj of layer l takes |
|----------|---------------|-------------------------------------------------|----------------------------|
| input    | l + 1         | h ← h Q, then its stock forward                 | R1(l)                      |
| residual | l             | y = r Q + MLP(r), r the residual before the MLP | R1(l+1)                    |

The product r Q does not depend on the MLP. So it can be computed beside the MLP, or in one operation with the
MLP's last product (drot/sparse/fused.py).

A layer that holds a rotation has its attention norm under another name, `rotated_input_layernorm`. A program
that reads a checkpoint as a stock model of its family then lacks a tensor in each of these layers. It cannot
compute with weights of another basis.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drot.config import BoundaryPlace
from drot.core.errors import UserError
from drot.model.families import Architecture, decoder_layers, module_at

#: Name of the module in a decoder layer that holds Q, also in the tensor names of a checkpoint.
ROTATION_MODULE = "residual_rotation"
#: Prefix of the attention norm's name in a decoder layer that holds Q.
NORM_PREFIX = "rotated_"
#: vectors with which `check_boundary_rotations` probes a rotation
PROBES = 4
#: largest ‖QᵀQx - x‖ / ‖x‖ of a rotation in fp32; rounding gives about 1e-7
FP32_TOLERANCE = 1e-3


@dataclass(frozen=True)
class BoundaryRotation:
    """Q = R1(l)ᵀ R1(l+1) at the boundary of layers l and l + 1.

    place: where Q acts, see above.
    r1: R1 [d, d] of layer l.
    next_r1: R1 [d, d] of layer l + 1.
    """

    place: BoundaryPlace
    r1: Tensor
    next_r1: Tensor

    def matrix(self) -> Tensor:
        """Q [d, d] in fp64."""
        return self.r1.double().T @ self.next_r1.double()

    def to(self, device: torch.device | str) -> "BoundaryRotation":
        return BoundaryRotation(self.place, self.r1.to(device), self.next_r1.to(device))


class RotateAndAdd(nn.Module):
    """forward(residual, x) = residual · Q + x · W_downᵀ + b, with x the input of down_proj.

    Base class of modules that rotate the residual and also compute down_proj. down_proj then returns its
    input x unchanged.
    """


class _Rotated:
    """Base of the classes of decoder layers that hold a rotation.

    `_rotated_class` creates these classes at run time, so pickle cannot find them by name. Pickle stores the
    arguments of `_rotated_class` instead.
    """

    architecture: Architecture

    def __reduce__(self) -> Any:
        stock_class, place = type(self).__bases__[1], rotation_place(self)
        return _new_rotated, (stock_class, self.architecture, place), self.__getstate__()


def _new_rotated(stock_class: Any, arch: Architecture, place: BoundaryPlace) -> Any:
    cls = _rotated_class(stock_class, arch, place)
    return cls.__new__(cls)


class _RotatesInput(_Rotated):
    """Mixin in front of a decoder layer's stock class: h ← h Q, then the stock forward."""

    residual_rotation: nn.Linear

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.residual_rotation(hidden_states), *args, **kwargs)  # type: ignore[misc]


class _RotatesResidual(_Rotated):
    """Mixin in front of a decoder layer's stock class: y = r Q + MLP(r).

    It replaces the stock forward, because r is computed in the middle of that forward. Every family in
    model/families.py has this form: pre-norm attention, then a pre-norm MLP.
    """

    residual_rotation: nn.Module

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        arch = self.architecture
        normed = getattr(self, arch.attention_norm)(hidden_states)
        attended, _ = getattr(self, arch.attention)(hidden_states=normed, **kwargs)
        residual = hidden_states + attended
        normed = getattr(self, arch.mlp_norm)(residual)
        out: Tensor = getattr(self, arch.mlp)(normed)
        if isinstance(self.residual_rotation, RotateAndAdd):
            layer_output: Tensor = self.residual_rotation(residual, out)
            return layer_output
        return self.residual_rotation(residual) + out


@functools.cache
def _rotated_class(stock_class: Any, arch: Architecture, place: BoundaryPlace) -> Any:
    """The class of a layer that rotates its input or its residual.

    The class has the name of the stock class, because accelerate and transformers find the layers that must
    not be split across devices by the names of their classes. The stock forward finds the attention norm
    under its stock name through a property.
    """
    name = NORM_PREFIX + arch.attention_norm
    attributes = {
        "__module__": stock_class.__module__,
        "architecture": arch,
        arch.attention_norm: property(lambda layer: getattr(layer, name)),
    }
    mixin = _RotatesResidual if place == "residual" else _RotatesInput
    return type(stock_class.__name__, (mixin, stock_class), attributes)


def rotation_place(layer: object) -> BoundaryPlace | None:
    """The place of the rotation that a decoder layer holds; None if it holds no rotation."""
    if isinstance(layer, _RotatesResidual):
        return "residual"
    return "input" if isinstance(layer, _RotatesInput) else None


def rotated_layers(layers: nn.ModuleList, place: BoundaryPlace) -> nn.ModuleList:
    """The layers that hold a rotation: all but the first for `input`, all but the last for `residual`."""
    holders = layers[:-1] if place == "residual" else layers[1:]
    assert isinstance(holders, nn.ModuleList)
    return holders


def add_boundary_rotation(
    layer: nn.Module,
    arch: Architecture,
    place: BoundaryPlace,
    hidden_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    apply: bool = True,
) -> nn.Linear:
    """Adds an uninitialised rotation to a decoder layer as `layer.residual_rotation`, and returns it.

    The rotation is an nn.Linear [d, d] without bias, h → h Wᵀ, so its weight is Qᵀ.

    Args:
        layer: a decoder layer.
        arch: family of the model.
        place: whether Q rotates the layer's input or the residual beside its MLP.
        hidden_size: d.
        dtype: dtype of Q.
        device: device of Q.
        apply: whether to call `apply_boundary_rotation` too.
    """
    rotation = nn.Linear(hidden_size, hidden_size, bias=False, dtype=dtype, device=device)
    rotation.requires_grad_(False)
    setattr(layer, ROTATION_MODULE, rotation)
    if apply:
        apply_boundary_rotation(layer, arch, place)
    return rotation


def apply_boundary_rotation(layer: nn.Module, arch: Architecture, place: BoundaryPlace) -> None:
    """Changes the class of a layer that has a rotation to a class that applies the rotation.

    The name of the attention norm gets NORM_PREFIX. A layer that has the class already is not changed.
    """
    if rotation_place(layer) is None:
        stock_class: Any = type(layer)
        norm = getattr(layer, arch.attention_norm)
        delattr(layer, arch.attention_norm)
        setattr(layer, NORM_PREFIX + arch.attention_norm, norm)
        layer.__class__ = _rotated_class(stock_class, arch, place)


def remove_boundary_rotation(layer: nn.Module) -> None:
    """Undoes `add_boundary_rotation`: the layer has its stock class and the stock name of its norm again."""
    assert isinstance(layer, _Rotated)
    name = layer.architecture.attention_norm
    norm = getattr(layer, NORM_PREFIX + name)
    layer.__class__ = type(layer).__bases__[1]
    delattr(layer, NORM_PREFIX + name)
    setattr(layer, name, norm)
    delattr(layer, ROTATION_MODULE)


@torch.no_grad()
def check_boundary_rotations(model: nn.Module, arch: Architecture) -> None:
    """Raises UserError that names the first boundary rotation of `model` that is not orthogonal.

    A matrix Q with NaN or infinity is not orthogonal either. QᵀQ would take d³ operations a layer, minutes
    for 80 layers of d = 8192 on a CPU. So ‖QᵀQx - x‖ / ‖x‖ is measured, in fp32, for PROBES random vectors x.
    A rotation that is offloaded to disk is not checked.
    """
    for index, layer in enumerate(decoder_layers(model, arch)):
        if rotation_place(layer) is None:
            continue
        q: Tensor = module_at(layer, f"{ROTATION_MODULE}.weight")
        if q.is_meta:
            continue
        x = torch.randn(q.shape[0], PROBES, generator=torch.Generator().manual_seed(0)).to(q.device)
        q32 = q.float()
        error = float(((q32.T @ (q32 @ x) - x).norm(dim=0) / x.norm(dim=0)).amax())
        if not error < orthogonality_tolerance(q):  # error may be NaN
            raise UserError(
                f"{arch.layers}.{index}.{ROTATION_MODULE}.weight must be orthogonal, got ‖QᵀQx - x‖ / ‖x‖ = "
                f"{error:.1e}: the file is damaged; copy it again"
            )


def orthogonality_tolerance(q: Tensor) -> float:
    """The largest ‖QᵀQx - x‖ / ‖x‖ of an intact rotation `q` [d, d].

    It depends on the coarsest dtype that holds all elements exactly, because `q` may have a wider dtype than
    the file. Rounding gives about 1.6e-3 in bf16 and 2e-4 in fp16.
    """
    for dtype in (torch.bfloat16, torch.float16):
        if bool((q.to(dtype).to(q.dtype) == q).all()):
            return 2 * torch.finfo(dtype).eps
    return FP32_TOLERANCE


@torch.no_grad()
def set_boundary(layer: nn.Module, arch: Architecture, boundary: BoundaryRotation) -> None:
    """Adds the rotation Q to `layer`, in the dtype and on the device of the layer's weights."""
    weight = next(layer.parameters())
    d = boundary.r1.shape[0]
    rotation = add_boundary_rotation(layer, arch, boundary.place, d, dtype=weight.dtype, device=weight.device)
    rotation.weight.copy_(boundary.matrix().T)
