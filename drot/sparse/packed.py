"""Packing of models: from dense weights, from files, and back to dense weights.

A packed checkpoint holds `<linear>.values` and `<linear>.positions` in place of `<linear>.weight` for the
seven linears of every decoder layer, and `quantization_config` in its config.json has `packed: true`. All
other tensors are those of the dense checkpoint.
"""

import typing
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from drot.architectures import architecture_of, decoder_layers, layer_linears, module_at
from drot.config import Sparsity, WeightFormat
from drot.devices import dtype_name
from drot.errors import UserError
from drot.sparse.fused import unfuse
from drot.sparse.linear import SparseLinear, packed_linears
from drot.sparse.quantization_config import describe_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: the dtypes of `values`
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_format(format: str, sparsity: Sparsity | None = None) -> None:
    """Raises UserError for an unknown `format`, and for packed with a sparsity other than 2:4."""
    if format not in typing.get_args(WeightFormat):
        raise UserError(f"`format` must be one of {', '.join(typing.get_args(WeightFormat))}; got {format!r}")
    if format == "packed" and sparsity is not None and (sparsity.n, sparsity.m) != (2, 4):
        raise UserError(f'`format="packed"` needs `sparsity="2:4"`; got {sparsity}')


def check_packable(model: "PreTrainedModel") -> None:
    """Raises UserError if the packed format does not support a linear's dtype or number of inputs."""
    arch = architecture_of(model.config)
    for index, layer in enumerate(decoder_layers(model, arch)):
        for role, linear in layer_linears(layer, arch).items():
            if linear.in_features % 8:
                raise UserError(
                    f"layer {index}, {role}: the packed format needs a multiple of 8 inputs, "
                    f'got {linear.in_features}: use `format="dense"`'
                )
            if linear.weight.dtype not in DTYPES:
                raise UserError(
                    f"layer {index}, {role}: the packed format needs bfloat16, float16 or float32, "
                    f"got {dtype_name(linear.weight.dtype)}: choose another `dtype`"
                )


def compress_model(model: nn.Module) -> None:
    """Calls `SparseLinear.compress` for every packed linear that does not have its compressed form yet."""
    for _, linear in packed_linears(model):
        if linear.compressed is None:
            linear.compress()


# ---- from dense and back -------------------------------------------------------------------------


@torch.no_grad()
def pack_model(model: "PreTrainedModel") -> None:
    """Packs the seven linears of every decoder layer, in place, and records that in the model's config.

    Raises UserError that names the layer, the linear and the row of a weight that is not 2:4. The linears
    before it are then packed already.
    """
    check_packable(model)
    arch = architecture_of(model.config)
    for index, layer in enumerate(decoder_layers(model, arch)):
        for role, linear in layer_linears(layer, arch).items():
            try:
                packed = SparseLinear.from_linear(linear)
            except ValueError as error:
                raise UserError(
                    f'layer {index}, {role}: {error}: prune with `sparsity="2:4"` first'
                ) from None
            layer.set_submodule(dict(arch.linears)[role], packed)
    describe_model(model)


@torch.no_grad()
def unpack_model(model: "PreTrainedModel") -> None:
    """The inverse of `pack_model`, in place: every linear is a dense nn.Linear again."""
    unfuse(model)
    arch = architecture_of(model.config)
    for layer in decoder_layers(model, arch):
        for _, path in arch.linears:
            layer.set_submodule(path, module_at(layer, path).to_linear())
    describe_model(model)


# ---- from files ----------------------------------------------------------------------------------


def expect_packed(model: "PreTrainedModel") -> None:
    """Replaces the linears of an empty model by uninitialised SparseLinears, to load packed weights into."""
    check_packable(model)
    arch = architecture_of(model.config)
    for layer in decoder_layers(model, arch):
        for role, linear in layer_linears(layer, arch).items():
            layer.set_submodule(dict(arch.linears)[role], SparseLinear.like(linear))


@torch.no_grad()
def check_positions(model: nn.Module) -> None:
    """Raises UserError that names the tensor and the row if the two positions of a group do not ascend."""
    for name, module in packed_linears(model):
        positions = module.positions
        if positions.is_meta:
            continue  # the weight is offloaded to disk
        ascend = _ascends(positions, 0) & _ascends(positions, 4)
        if not bool(ascend.all()):
            row = int((~ascend).any(1).nonzero()[0])
            raise UserError(
                f"{name}.positions: two positions of a group of 4 are equal or out of order in row {row}: "
                "the file is damaged; copy or convert it again"
            )


def _ascends(positions: Tensor, shift: int) -> Tensor:
    """For each byte, whether the two 2-bit positions that start at bit `shift` ascend."""
    return ((positions >> shift) & 3) < ((positions >> (shift + 2)) & 3)
