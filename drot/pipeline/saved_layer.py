"""A pruned layer in the form in which the checkpoint holds it: rounded to the saved dtype, and packed.

A layer is rounded when it is pruned, so that the layers after it are calibrated on the outputs of the weights
that are saved. Its tensors are written once, and the file becomes a shard of the checkpoint.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from drot.checkpoint.dtypes import rounded
from drot.model.block_rotation import DOWN_ROTATION
from drot.model.boundary import ROTATION_MODULE
from drot.model.dtypes import stored_floats
from drot.model.layer import DecoderLayer
from drot.model.rotation import Bases
from drot.model.stored import as_dense, load_stored
from drot.sparse.linear import PackedWeight
from drot.sparse.packed import pack_layer


@torch.no_grad()
def round_layer(layer: DecoderLayer, dtype: torch.dtype, leave: Collection[str] = ()) -> None:
    """Rounds the tensors of a layer as a checkpoint of `dtype` does, in place. They keep their own dtype.

    Raises UserError for a value that `dtype` cannot hold.

    leave: names of linears whose weights are left as they are.
    """
    if layer.dtype == dtype:
        return
    modules = {id(linear.parameter) for linear in layer.linears.values()}
    for name, tensor in stored_floats(layer.module):
        if id(tensor) not in modules:
            tensor.copy_(_stored(layer, name, tensor, dtype))
    for linear in layer.linears.values():
        if linear.name not in leave:
            linear.weight.copy_(rounded(f"{linear.full_name}.weight", linear.weight.data, dtype))


def _stored(layer: DecoderLayer, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of a layer as a checkpoint of `dtype` holds it."""
    name = layer.prefix + name
    return rounded(name, tensor.data, layer.stored_dtype(name, dtype))


@torch.no_grad()
def as_saved(layer: DecoderLayer, dtype: torch.dtype, dense: Collection[str] | None) -> tuple[int, int]:
    """Brings a pruned layer, in place, into the form of the checkpoint. No step of the run follows.

    Returns the number of zeros, and of weights, of its linears.

    dense: names of linears that are not packed; None packs no linear.
    """
    counts = layer.zeros()
    for name, tensor in stored_floats(layer.module):
        tensor.data = _stored(layer, name, tensor, dtype)
    if dense is not None:
        pack_layer(layer, dense)
    return counts


@torch.no_grad()
def load_tensors(layer: DecoderLayer, tensors: dict[str, Tensor], bases: Bases) -> None:
    """Loads what `stored_tensors` gave, into a layer that then computes as before `as_saved`.

    If the layer has a boundary matrix of its input, it holds the matrix afterwards, but does not apply it.
    """
    own = dense_tensors(layer, tensors)
    if f"{layer.prefix}{ROTATION_MODULE}.weight" in own:
        assert bases.place is not None
        layer.expect_boundary(bases.place)
        layer.apply_boundary(None if bases.place == "input" else bases.place)
    if (r3 := next((own[name] for name in own if f"{DOWN_ROTATION}.weight" in name), None)) is not None:
        layer.expect_down_rotation(r3.shape[-1])
    load_stored(layer, own)


def dense_tensors(layer: DecoderLayer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `stored_tensors` gave, with packed weights made dense, as `load_stored` takes it."""
    own = dict(tensors)
    for name in [name for name in own if name.endswith(".values")]:
        packed = name.removesuffix(".values")
        weight = PackedWeight(own.pop(name), own.pop(f"{packed}.positions")).to_dense()
        own.update([as_dense(layer, packed, weight)])
    return own
