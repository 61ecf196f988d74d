"""The rotation of the residual stream between two layers that have different bases.

Neighbouring rotations merge into one matrix a boundary, Q = R1(l)ᵀ R1(l+1) (paper, section 4.4),
which the later layer applies to its input.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

RESIDUAL_ROTATION = "residual_rotation"


class _RotatesInput:
    """Mixed in before a decoder layer's class: multiplies the incoming stream, then goes on."""

    residual_rotation: nn.Linear

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.residual_rotation(hidden_states), *args, **kwargs)  # type: ignore[misc]


@functools.cache
def _rotated(cls: Any) -> Any:
    # Same name, since accelerate and transformers find the layers that they must not split by name.
    return type(cls.__name__, (_RotatesInput, cls), {"__module__": cls.__module__})


def has_residual_rotation(layer: nn.Module) -> bool:
    return isinstance(layer, _RotatesInput)


def add_residual_rotation(
    layer: nn.Module, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str
) -> nn.Linear:
    """Gives a decoder layer an (uninitialised) `residual_rotation` and returns it.

    It is a bias-free nn.Linear, h → h Wᵀ, so its weight holds Qᵀ.
    """
    rotation = nn.Linear(hidden_size, hidden_size, bias=False, dtype=dtype, device=device)
    rotation.requires_grad_(False)
    setattr(layer, RESIDUAL_ROTATION, rotation)
    if not has_residual_rotation(layer):
        cls: Any = type(layer)
        layer.__class__ = _rotated(cls)
    return rotation


def remove_residual_rotation(layer: nn.Module) -> None:
    """Undoes `add_residual_rotation`: the layer is of its own class again, and the stream is not rotated."""
    layer.__class__ = type(layer).__bases__[1]
    delattr(layer, RESIDUAL_ROTATION)


@torch.no_grad()
def set_boundary(
    layer: nn.Module, before: Tensor, after: Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    """Makes `layer`, whose basis is `after`, accept a stream in basis `before` (both R1 [d, d])."""
    rotation = add_residual_rotation(layer, before.shape[0], dtype=dtype, device=device)
    q = before.double().T @ after.double()
    rotation.weight.copy_(q.T)
