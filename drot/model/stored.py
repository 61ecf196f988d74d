"""The tensors of a decoder layer by their names in a checkpoint, where each expert lies by itself."""

import torch
from torch import Tensor

from drot.model.block_rotation import DOWN_ROTATION
from drot.model.experts import PACKED
from drot.model.layer import DecoderLayer
from drot.model.linear import Linear


def stored_name(layer: DecoderLayer, linear: Linear) -> str:
    """The name of the tensor in a checkpoint that holds the weight of a linear."""
    if linear.spec.expert is None:
        return f"{layer.prefix}{linear.spec.path}.weight"
    if not layer.family.expert_files:
        return layer.prefix + linear.spec.path
    file = dict(layer.family.expert_files)[linear.spec.part or ""]
    return layer.prefix + file.format(linear.spec.expert)


def packed_name(layer: DecoderLayer, linear: Linear) -> str:
    """The name of the tensor in a checkpoint that holds the values of a linear if it is packed."""
    if linear.spec.expert is None:
        return f"{layer.prefix}{linear.spec.path}.values"
    return f"{_packed_prefixes(layer)[1]}{linear.module_name}.values"


def _packed_prefixes(layer: DecoderLayer) -> tuple[str, str]:
    """What the names of packed experts begin with in the model, and in a checkpoint.

    No tensor of a layer without experts has such a name.
    """
    return _in_experts(layer, PACKED)


def _r3_names(layer: DecoderLayer) -> tuple[str, str]:
    """The same for the R3 of experts."""
    return _in_experts(layer, DOWN_ROTATION)


def _in_experts(layer: DecoderLayer, name: str) -> tuple[str, str]:
    in_files = layer.family.experts_file or layer.family.experts
    return f"{layer.prefix}{layer.family.experts}.{name}", f"{layer.prefix}{in_files}.{name}"


def as_dense(layer: DecoderLayer, name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Name and tensor, as `load_stored` takes them, of a weight that a checkpoint holds packed.

    name: what the names of values and positions begin with there. weight: [out, in], or [experts, out, in].
    """
    _, stored = _packed_prefixes(layer)
    if not name.startswith(stored):
        return f"{name}.weight", weight
    path = f"{layer.family.experts}.{name.removeprefix(stored)}"
    (transposed,) = {linear.transposed for linear in layer.family.linears if linear.path == path}
    return layer.prefix + path, weight.mT if transposed else weight


def stored_tensors(layer: DecoderLayer) -> dict[str, Tensor]:
    """The tensors of the layer by their names in a checkpoint, where each expert lies by itself."""
    found = {layer.prefix + name: tensor for name, tensor in layer.module.state_dict().items()}
    for own, stored in (_packed_prefixes(layer), _r3_names(layer)):
        for name in [name for name in found if name.startswith(own)]:
            found[stored + name.removeprefix(own)] = found.pop(name)
    if layer.family.router is not None:
        found[layer.prefix + layer.family.router_file] = found.pop(
            f"{layer.prefix}{layer.family.router}.weight"
        )
    for linear in layer.linears.values():
        if linear.spec.expert is not None and layer.family.expert_files and linear.is_dense:
            found.pop(layer.prefix + linear.spec.path, None)
            found[stored_name(layer, linear)] = linear.weight.detach()
    return found


@torch.no_grad()
def load_stored(layer: DecoderLayer, tensors: dict[str, Tensor]) -> None:
    """Loads what `stored_tensors` gave of a layer without packed weights, or with those of `as_dense`."""
    own = dict(tensors)
    of_model, stored = _r3_names(layer)
    for name in [name for name in own if name.startswith(stored)]:
        own[of_model + name.removeprefix(stored)] = own.pop(name)
    if layer.family.router is not None:
        own[f"{layer.prefix}{layer.family.router}.weight"] = own.pop(layer.prefix + layer.family.router_file)
    for linear in layer.linears.values():
        name = stored_name(layer, linear)
        if linear.spec.expert is not None and layer.family.expert_files and name in own:
            linear.weight.copy_(own.pop(name))
            own[layer.prefix + linear.spec.path] = linear.parameter
    layer.module.load_state_dict({name.removeprefix(layer.prefix): each for name, each in own.items()})
