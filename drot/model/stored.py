"""The tensors of a decoder layer by their names in a checkpoint, where each expert lies by itself."""

import torch
from torch import Tensor

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


def stored_tensors(layer: DecoderLayer) -> dict[str, Tensor]:
    """The tensors of the layer by their names in a checkpoint, where each expert lies by itself."""
    found = {layer.prefix + name: tensor for name, tensor in layer.module.state_dict().items()}
    if layer.family.router is not None:
        found[layer.prefix + layer.family.router_file] = found.pop(
            f"{layer.prefix}{layer.family.router}.weight"
        )
    for linear in layer.linears.values():
        if linear.spec.expert is not None and layer.family.expert_files:
            found.pop(layer.prefix + linear.spec.path, None)
            found[stored_name(layer, linear)] = linear.weight.detach()
    return found


@torch.no_grad()
def load_stored(layer: DecoderLayer, tensors: dict[str, Tensor]) -> None:
    """Loads what `stored_tensors` gave."""
    own = dict(tensors)
    if layer.family.router is not None:
        own[f"{layer.prefix}{layer.family.router}.weight"] = own.pop(layer.prefix + layer.family.router_file)
    for linear in layer.linears.values():
        if linear.spec.expert is not None and layer.family.expert_files:
            linear.weight.copy_(own.pop(stored_name(layer, linear)))
            own[layer.prefix + linear.spec.path] = linear.parameter
    layer.module.load_state_dict({name.removeprefix(layer.prefix): each for name, each in own.items()})
