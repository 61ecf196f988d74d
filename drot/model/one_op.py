"""Parts of a decoder layer that one op computes, where transformers starts several: norms, gated MLPs, RoPE.

With 2:4 weights and few tokens, starting ops takes a large part of a layer's time.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drot.model.block_rotation import DOWN_ROTATION, SILU, activation_of, gated_activation
from drot.model.family import Family
from drot.model.linear import module_at
from drot.model.mixins import Mixin, mix, unmix
from drot.model.one_op_rope import OneOpRope, has_standard_rope


class GatedMLP(Mixin):
    """Mixin in front of a family's class of gated MLPs: gates by one op, with R3 if it holds one.

    parts: the names of its modules (`Family.mlp_parts`).
    """

    family: Family
    parts: tuple[tuple[str, ...], str]
    training: bool

    def forward(self: Any, x: Tensor) -> Tensor:
        """x [..., d] -> what the stock forward returns."""
        family, (inputs, output) = self.family, self.parts
        outputs = [getattr(self, name)(x) for name in inputs]
        gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
        gated = getattr(self, DOWN_ROTATION, gated_activation)(gate, up, activation_of(self, family))
        result: Tensor = getattr(self, output)(gated)
        if family.mlp_dropout is None:
            return result
        return nn.functional.dropout(result, getattr(self, family.mlp_dropout), self.training)


class OneOpNorm(Mixin):
    """Mixin in front of a class of norms x ↦ γ x / sqrt(mean(x²) + ε)."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> what the stock forward returns, but for its rounding in 16 bits."""
        # on a GPU autocast lets rms_norm return fp32, which the stock forward does not
        if x.dtype != self.weight.dtype or torch.is_autocast_enabled(x.device.type):
            result: Tensor = super().forward(x)  # type: ignore[misc]
            return result
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


def use_one_op(layer: nn.Module, family: Family) -> None:
    """Lets one op compute each norm, gated activation and RoPE of a layer, where drot or torch has the op."""
    for module, mixin, given in _parts(layer, family):
        if not isinstance(module, mixin):
            mix(module, mixin, **given)


def use_stock_ops(layer: nn.Module, family: Family) -> None:
    """Undoes `use_one_op`. An MLP that holds R3 stays a GatedMLP."""
    for module, mixin, _ in _parts(layer, family):
        if isinstance(module, mixin) and not hasattr(module, DOWN_ROTATION):
            unmix(module)


def _parts(layer: nn.Module, family: Family) -> Iterator[tuple[Any, type[Mixin], dict[str, Any]]]:
    """The modules of a layer that one op can compute, each with its mixin and the attributes of that."""
    attention = module_at(layer, family.attention or family.mlp)
    if has_standard_rope(attention):
        yield attention, OneOpRope, {}
    for norm in _rms_norms(layer, family):
        yield norm, OneOpNorm, {}
    for path in family.down_modules:
        mlp = module_at(layer, path)
        if path != family.experts and isinstance(activation_of(mlp, family), SILU):
            yield mlp, GatedMLP, {"family": family, "parts": family.mlp_parts(path)}


def _rms_norms(layer: nn.Module, family: Family) -> Iterator[Any]:
    """The norms of a layer that OneOpNorm computes, also those of its heads."""
    if family.norm_offset or family.layer_norm:
        return
    present = {name for name, _ in layer.named_modules()}
    of_heads = (path for path in family.untouched if path in present)
    for path in (*family.norms, *(family.post_norms or ()), *of_heads):
        norm = module_at(layer, path)
        # one with a gate has a second argument
        if hasattr(norm, "variance_epsilon") and len(inspect.signature(norm.forward).parameters) == 1:
            yield norm
