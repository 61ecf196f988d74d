"""The rotation of the residual stream between two layers that have different bases.

Neighbouring rotations merge into one matrix a boundary, Q = R1(l)ᵀ R1(l+1) (paper, section 4.4). Either
the later layer applies it to its input; or down_proj of the earlier one is in the later one's basis
already, and Q acts on the residual beside the MLP alone: y = r Q + MLP(r). The second can be computed
while the MLP is, or added to by its last product.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from drot.architectures import Architecture

RESIDUAL_ROTATION = "residual_rotation"


class _Rotated:
    """What both kinds of rotated layers have: their class is made at run time, so pickle is told how."""

    def __reduce__(self) -> Any:
        own, inside = type(self).__bases__[1], getattr(self, "architecture", None)
        return _empty, (own, inside), self.__getstate__()


def _empty(own: Any, inside: Architecture | None) -> Any:
    cls = _rotated(own, inside)
    return cls.__new__(cls)


class _RotatesInput(_Rotated):
    """Mixed in before a decoder layer's class: multiplies the incoming stream, then goes on."""

    residual_rotation: nn.Linear

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.residual_rotation(hidden_states), *args, **kwargs)  # type: ignore[misc]


class _RotatesResidual(_Rotated):
    """Mixed in before a decoder layer's class: multiplies the residual to which the MLP's output is added.

    It stands for the class's own forward, since the place is in the middle of that: pre-norm attention
    and pre-norm MLP, as every family in architectures.py has them.
    """

    residual_rotation: nn.Module
    architecture: Architecture

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        arch = self.architecture
        normed = getattr(self, arch.attention_norm)(hidden_states)
        attended, _ = getattr(self, arch.attention)(hidden_states=normed, **kwargs)
        residual = hidden_states + attended
        normed = getattr(self, arch.mlp_norm)(residual)
        out: Tensor = getattr(self, arch.mlp)(normed)
        if getattr(self.residual_rotation, "makes_down_proj", False):  # drot/sparse/fused.py
            rotated: Tensor = self.residual_rotation(residual, out)
            return rotated
        return self.residual_rotation(residual) + out


@functools.cache
def _rotated(cls: Any, inside: Architecture | None) -> Any:
    # Same name, since accelerate and transformers find the layers that they must not split by name.
    attributes = {"__module__": cls.__module__}
    if inside is None:
        return type(cls.__name__, (_RotatesInput, cls), attributes)
    return type(cls.__name__, (_RotatesResidual, cls), attributes | {"architecture": inside})


def has_residual_rotation(layer: nn.Module) -> bool:
    return isinstance(layer, _Rotated)


def rotates_beside_mlp(layer: nn.Module) -> bool:
    """Whether the residual is rotated beside the MLP, not in front of the layer."""
    return isinstance(layer, _RotatesResidual)


def rotation_config(layers: Iterable[nn.Module]) -> dict[str, Any]:
    """What config.json says of the rotations in `layers` (drot/hf.py); empty where there are none."""
    for layer in layers:
        if has_residual_rotation(layer):
            inside = {"down_basis": "next"} if rotates_beside_mlp(layer) else {}
            return {"residual_rotation": True, **inside}
    return {}


def add_residual_rotation(
    layer: nn.Module,
    hidden_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    inside: Architecture | None = None,
) -> nn.Linear:
    """Gives a decoder layer an (uninitialised) `residual_rotation` and returns it.

    It is a bias-free nn.Linear, h → h Wᵀ, so its weight holds Qᵀ. inside: the layer's architecture
    where Q acts on the residual beside the MLP; None puts it in front of the layer.
    """
    rotation = nn.Linear(hidden_size, hidden_size, bias=False, dtype=dtype, device=device)
    rotation.requires_grad_(False)
    setattr(layer, RESIDUAL_ROTATION, rotation)
    if not has_residual_rotation(layer):
        cls: Any = type(layer)
        layer.__class__ = _rotated(cls, inside)
    return rotation


def remove_residual_rotation(layer: nn.Module) -> None:
    """Undoes `add_residual_rotation`: the layer is of its own class again, and the stream is not rotated."""
    layer.__class__ = type(layer).__bases__[1]
    delattr(layer, RESIDUAL_ROTATION)


@torch.no_grad()
def set_boundary(
    layer: nn.Module,
    before: Tensor,
    after: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    inside: Architecture | None = None,
) -> None:
    """Puts Q = beforeᵀ after (both R1 [d, d]) into `layer`.

    inside=None: the layer's basis is `after`, it accepts a stream in basis `before`. Otherwise its basis
    is `before` and that of its down_proj `after`, in which its outputs are.
    """
    rotation = add_residual_rotation(layer, before.shape[0], dtype=dtype, device=device, inside=inside)
    q = before.double().T @ after.double()
    rotation.weight.copy_(q.T)
