"""Packing of models: from dense weights, from files, and back to dense weights.

A packed checkpoint holds `<linear>.values` and `<linear>.positions` in place of `<linear>.weight` for the
linears of every decoder layer, and `quantization_config` in its config.json has `packed: true`. All other
tensors are those of the dense checkpoint. Linears that are not 2:4 stay dense next to packed ones;
`dense_linears` in `quantization_config` names them. A fused module is packed as a whole: if one of its slices
is not 2:4, all of them stay dense. So is a parameter with the weights of all experts, which becomes a
SparseExperts, such as `mlp.experts.packed_down_proj`.
"""

import typing
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drot.config import PruningConfig, Sparsity, WeightFormat
from drot.core.errors import UserError
from drot.machine.devices import dtype_name
from drot.machine.finite import is_finite
from drot.model.decoder import DecoderModel
from drot.model.experts import replace_weights, restore_weights
from drot.model.families import layer_families
from drot.model.family import by_module
from drot.model.layer import DecoderLayer
from drot.model.linear import Linear
from drot.sparse.experts import SparseExperts
from drot.sparse.fused import unfuse
from drot.sparse.linear import PACKABLE_DTYPES, SparseLinear, is_packed, packed_linears, packed_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: the sparsity that can be packed
PACKABLE = Sparsity.parse("2:4")


def check_format(format: str, pruning: PruningConfig | None = None) -> None:
    """Raises UserError for an unknown `format`, and for packed if no sparsity of `pruning` is 2:4."""
    if format not in typing.get_args(WeightFormat):
        raise UserError(f"`format` must be one of {', '.join(typing.get_args(WeightFormat))}; got {format!r}")
    if format == "packed" and pruning is not None and PACKABLE not in pruning.sparsities:
        got = ", ".join(map(str, pruning.sparsities))
        raise UserError(f'`format="packed"` needs `sparsity="2:4"`; got {got}')


def dense_linears(config: Any, pruning: PruningConfig) -> list[str]:
    """The names of the linears that a packed model of `config` leaves dense, as their module is not 2:4.

    Raises UserError if no module is 2:4.
    """
    dense, count = [], 0
    for index, family in enumerate(layer_families(config, config.num_hidden_layers)):
        for linears in by_module(family.linears):
            names = [family.full_name(index, linear) for linear in linears]
            count += len(names)
            if any(pruning.sparsity_for(name) != PACKABLE for name in names):
                dense += names
    if len(dense) == count:
        raise UserError(
            f'`format="packed"` needs a linear with the sparsity 2:4; `keep` and `sparsity_of` leave none of '
            f'the {count} linears: use `format="dense"`'
        )
    return dense


def _linears_to_pack(layers: Iterable[DecoderLayer], dense: Collection[str]) -> Iterator[tuple[str, Linear]]:
    """A name for messages and the first linear of each module, or parameter of experts, of which no linear
    is in `dense`."""
    for layer in layers:
        for specs in by_module(layer.family.linears):
            linears = [layer.linears[spec.name] for spec in specs]
            if not any(linear.full_name in dense for linear in linears):
                yield f"layer {layer.index}, {linears[0].module_name}", linears[0]


def check_packable(model: "PreTrainedModel", dense: Collection[str] = ()) -> None:
    """Raises UserError if the packed format does not support a linear's dtype or number of inputs.

    dense: names of linears that are not packed.
    """
    for name, linear in _linears_to_pack(DecoderModel(model).layers, dense):
        if (inputs := linear.weight.shape[1]) % 8:
            raise UserError(
                f'{name}: the packed format needs a multiple of 8 inputs, got {inputs}: use `format="dense"`'
            )
        if linear.weight.dtype not in PACKABLE_DTYPES:
            raise UserError(
                f"{name}: the packed format needs bfloat16, float16 or float32, "
                f"got {dtype_name(linear.weight.dtype)}: choose another `dtype`"
            )


def compress_model(model: nn.Module) -> None:
    """Calls `SparseLinear.compress` for every packed linear that does not have its compressed form yet.

    A weight that is offloaded to disk is left out.
    """
    for _, linear in packed_linears(model):
        if linear.compressed is None and not linear.values.is_meta:
            linear.compress()


# ---- from dense and back -------------------------------------------------------------------------


@torch.no_grad()
def pack_model(model: "PreTrainedModel", dense: Collection[str] = ()) -> None:
    """Packs the linears of every decoder layer, in place.

    The model's config does not say so until `as_drot_model` (drot/checkpoint/hf_model.py) is called.

    dense: names of linears that stay dense, such as `layers.0.mlp.down_proj`.

    Raises UserError that names the layer, the linear and the row of a weight that is not 2:4. The linears
    before it are then packed already.
    """
    check_packable(model, dense)
    for layer in DecoderModel(model).layers:
        pack_layer(layer, dense)


@torch.no_grad()
def pack_layer(layer: DecoderLayer, dense: Collection[str] = ()) -> None:
    """As `pack_model`, for one layer of a model that `check_packable` has accepted."""
    for name, linear in _linears_to_pack([layer], dense):
        try:
            if linear.spec.expert is None:
                linear.module = SparseLinear.from_linear(linear.plain)
            else:
                packed = SparseExperts.from_dense(linear.of_experts)
                replace_weights(layer.module, layer.family, linear.spec.path, packed)
        except ValueError as error:
            told = str(error).replace("w must", "the weight must", 1)  # w is the name of the op's argument
            raise UserError(f'{name}: {told}: prune with `sparsity="2:4"` first') from None


@torch.no_grad()
def unpack_model(model: "PreTrainedModel") -> list[str]:
    """The inverse of `pack_model`, in place. Returns the names of the modules with the dense weights."""
    unfuse(model)
    return _unpack(model)


@torch.no_grad()
def unpack_layer(layer: DecoderLayer) -> None:
    """The inverse of `pack_layer`, of a layer that is not fused."""
    _unpack(layer.module)


def _unpack(module: nn.Module) -> list[str]:
    names = []
    for name, weight in list(packed_weights(module)):
        if isinstance(weight, SparseLinear):
            module.set_submodule(name, weight.to_linear())
        elif isinstance(weight, SparseExperts):
            name, _, replaced = name.rpartition(".")
            restore_weights(module.get_submodule(name), replaced, weight.to_dense())
        names.append(name)
    return names


# ---- from files ----------------------------------------------------------------------------------


def expect_packed(model: "PreTrainedModel", dense: Collection[str] = ()) -> None:
    """Makes the linears of an empty model packed and uninitialised, to load packed weights into.

    dense: names of linears that stay dense. Raises UserError for a name that no linear has, and if no linear
        is packed.
    """
    names = {linear.full_name for layer in DecoderModel(model).layers for linear in layer.linears.values()}
    if unknown := sorted(set(dense) - names):
        raise UserError(
            f"config.json: dense_linears has {unknown[0]!r}, which is no linear of this model: config.json "
            "was edited or is of another model; copy it again"
        )
    check_packable(model, dense)
    for layer in DecoderModel(model).layers:
        for _, linear in _linears_to_pack([layer], dense):
            if linear.spec.expert is None:
                linear.module = SparseLinear.like(linear.plain)
        expect_packed_experts(layer, dense)
    if not is_packed(model):
        raise UserError("config.json: dense_linears has every linear of a packed model: copy it again")


def expect_packed_experts(layer: DecoderLayer, dense: Collection[str] = ()) -> None:
    """As `expect_packed`, for the experts of one layer alone."""
    for _, linear in _linears_to_pack([layer], dense):
        if linear.spec.expert is not None:
            empty = SparseExperts.like(linear.of_experts)
            replace_weights(layer.module, layer.family, linear.spec.path, empty)


@torch.no_grad()
def check_packed(model: nn.Module) -> None:
    """Raises UserError that names the first packed tensor that is damaged.

    A value that is NaN or infinite is damage, and so are two positions of a group that do not ascend. The
    message names the row of the positions.
    """
    for name, module in packed_weights(model):
        if not module.positions.is_meta:  # the weight is not offloaded to disk
            check_packed_tensors(name, module.values, module.positions)


def check_packed_tensors(name: str, values: Tensor, positions: Tensor) -> None:
    """`check_packed` for the weight `name`. values: [..., out, in/2]. positions: uint8 [..., out, in/8]."""
    if not is_finite(values):
        raise UserError(
            f"{name}.values must be finite, got NaN or infinity: the file is damaged; copy or convert it "
            "again"
        )
    ascend = _ascends(positions, 0) & _ascends(positions, 4)
    if not bool(ascend.all()):
        *expert, row = (~ascend).any(-1).nonzero()[0].tolist()
        of = f" of expert {expert[0]}" if expert else ""
        raise UserError(
            f"{name}.positions: two positions of a group of 4 are equal or out of order in row {row}{of}: "
            "the file is damaged; copy or convert it again"
        )


def _ascends(positions: Tensor, shift: int) -> Tensor:
    """For each byte, whether the two 2-bit positions that start at bit `shift` ascend."""
    return ((positions >> shift) & 3) < ((positions >> (shift + 2)) & 3)
