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
from typing import Any

import torch
from torch import Tensor, nn

from drot.config import BoundaryPlace
from drot.core.errors import UserError
from drot.model.families import Family

#: Name of the module in a decoder layer that holds Q, also in the tensor names of a checkpoint.
ROTATION_MODULE = "residual_rotation"
#: Prefix of the attention norm's name in a decoder layer that holds Q.
NORM_PREFIX = "rotated_"
#: vectors with which `check_boundary_rotations` probes a rotation
PROBES = 4
#: largest ‖QᵀQx - x‖ / ‖x‖ of a rotation in fp32; rounding gives about 1e-7
FP32_TOLERANCE = 1e-3


class RotateAndAdd(nn.Module):
    """forward(residual, x) = residual · Q + x · W_downᵀ + b, with x the input of down_proj.

    Base class of modules that rotate the residual and also compute down_proj. down_proj then returns its
    input x unchanged.
    """


class RotatedLayer:
    """Mixin in front of a family's class of decoder layers, for a layer that holds Q.

    place `input`: h ← h Q, then the stock forward. place `residual`: y = r Q + MLP(r). This replaces the
    stock forward, in whose middle r is computed. Every family in model/families.py has its form: pre-norm
    attention, then a pre-norm MLP.

    transformers has no registry for the classes of decoder layers: the code of each model names its own. So
    `add_boundary_rotation` changes the class of a layer. The new class has the name of the stock class,
    because accelerate and transformers find by name the layers that must not be split across devices.
    """

    family: Family
    boundary_place: BoundaryPlace
    residual_rotation: nn.Module

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """hidden_states h [batch, length, d] -> what the stock forward returns."""
        if self.boundary_place == "input":
            rotated = self.residual_rotation(hidden_states)
            return super().forward(rotated, **kwargs)  # type: ignore[misc]
        family = self.family
        normed = getattr(self, family.first_norm)(hidden_states)
        attended, _ = getattr(self, family.attention)(hidden_states=normed, **kwargs)
        residual = hidden_states + attended
        out = getattr(self, family.mlp)(getattr(self, family.norms[1])(residual))
        if isinstance(self.residual_rotation, RotateAndAdd):
            return self.residual_rotation(residual, out)
        return self.residual_rotation(residual) + out

    def __reduce__(self) -> Any:
        # pickle finds no class by name that was made at run time
        return _new_rotated, (type(self).__bases__[1], self.family), self.__getstate__()


def _new_rotated(stock_class: Any, family: Family) -> Any:
    cls = _rotated_class(stock_class, family)
    return cls.__new__(cls)


@functools.cache
def _rotated_class(stock_class: Any, family: Family) -> Any:
    """RotatedLayer in front of `stock_class`, whose forward finds the attention norm under its stock name."""
    name = NORM_PREFIX + family.first_norm
    attributes = {
        "__module__": stock_class.__module__,
        "family": family,
        family.first_norm: property(lambda layer: getattr(layer, name)),
    }
    return type(stock_class.__name__, (RotatedLayer, stock_class), attributes)


def rotation_place(layer: object) -> BoundaryPlace | None:
    """The place of the rotation that a decoder layer holds; None if it holds no rotation."""
    return layer.boundary_place if isinstance(layer, RotatedLayer) else None


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

    Args:
        layer: a decoder layer without a rotation.
        family: family of the model.
        place: whether Q rotates the layer's input or the residual beside its MLP.
        hidden_size: d.
        dtype: dtype of Q.
        device: device of Q.
    """
    rotation = nn.Linear(hidden_size, hidden_size, bias=False, dtype=dtype, device=device)
    rotation.requires_grad_(False)
    setattr(layer, ROTATION_MODULE, rotation)
    setattr(layer, NORM_PREFIX + family.first_norm, getattr(layer, family.first_norm))
    delattr(layer, family.first_norm)
    layer.boundary_place = place
    stock_class: Any = type(layer)
    layer.__class__ = _rotated_class(stock_class, family)
    return rotation


def remove_boundary_rotation(layer: Any) -> None:
    """Undoes `add_boundary_rotation`: the layer has its stock class and the stock name of its norm again."""
    assert isinstance(layer, RotatedLayer)
    name = layer.family.first_norm
    norm = getattr(layer, NORM_PREFIX + name)
    layer.__class__ = type(layer).__bases__[1]
    for added in (NORM_PREFIX + name, ROTATION_MODULE, "boundary_place"):
        delattr(layer, added)
    setattr(layer, name, norm)


@torch.no_grad()
def check_boundary_rotations(layers: nn.ModuleList, path: str) -> None:
    """Raises UserError that names the first boundary rotation of `layers` that is not orthogonal.

    A matrix Q with NaN or infinity is not orthogonal either. QᵀQ would take d³ operations a layer, minutes
    for 80 layers of d = 8192 on a CPU. So ‖QᵀQx - x‖ / ‖x‖ is measured, in fp32, for PROBES random vectors x.
    A rotation that is offloaded to disk is not checked.

    path: the path of the layers in their model, for the message.
    """
    for index, layer in enumerate(layers):
        if not isinstance(layer, RotatedLayer):
            continue
        q: Any = layer.residual_rotation.weight
        if q.is_meta:
            continue
        x = torch.randn(q.shape[0], PROBES, generator=torch.Generator().manual_seed(0)).to(q.device)
        q32 = q.float()
        error = float(((q32.T @ (q32 @ x) - x).norm(dim=0) / x.norm(dim=0)).amax())
        if not error < orthogonality_tolerance(q):  # error may be NaN
            raise UserError(
                f"{path}.{index}.{ROTATION_MODULE}.weight must be orthogonal, got ‖QᵀQx - x‖ / ‖x‖ = "
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
