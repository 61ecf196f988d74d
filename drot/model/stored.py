"""The tensors of a decoder layer by their names in a checkpoint, where each expert may lie by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drot.core.errors import UserError
from drot.model.decoder import EXPERTS_IN_FILES, DecoderModel
from drot.model.experts import PACKED_PREFIX
from drot.model.families import family_of
from drot.model.layer import DecoderLayer
from drot.model.linear import Linear


def follow_files(model: Any, shapes: Mapping[str, Sequence[int]], published: str = "apart") -> None:
    """Lets a model's tensors of experts have the names and shapes of its files, which have three forms.

    The files of a mixture hold each expert by itself (`Family.expert_files`), or the parameters of all
    experts of a layer, as those of Qwen3.5 MoE do, or these as [experts, in, out], as those of Qwen3-VL MoE.

    Raises UserError for files that hold experts in several forms, and for a form that transformers does not
    read.

    shapes: of the tensors in the files, by their names in the model; a saved base model has no prefix.
    published: the form (`EXPERTS_IN_FILES`) of published files. It is that of these files too if all experts
        are packed, so that no name says it.
    """
    setattr(model, EXPERTS_IN_FILES, "apart")
    prefix = family_of(model.config).in_files(f"{model.base_model_prefix}.")
    known = {
        name if name.startswith(prefix) else prefix + name: list(shape) for name, shape in shapes.items()
    }
    forms = set()
    for layer in DecoderModel(model).layers:
        routed = [linear for linear in layer.linears.values() if linear.spec.expert is not None]
        for linear in routed if layer.family.expert_files else ():
            if stored_name(layer, linear) in known:
                forms.add("apart")
            if (shape := known.get(_in_files(layer, linear.spec.path))) is not None:
                experts, rows, columns = linear.parameter.shape
                if rows != columns:  # which gate and up are, or else down
                    swapped = published == "swapped" and shape == [experts, columns, rows]
                    forms.add("swapped" if swapped else "together")
    if len(forms) > 1 or (published == "swapped" and "apart" in forms):
        raise UserError(
            "the files must hold the experts of a layer together, or each by itself where transformers reads "
            "that: open the model with transformers and save it again"
        )
    setattr(model, EXPERTS_IN_FILES, forms.pop() if forms else published)


def stored_name(layer: DecoderLayer, linear: Linear) -> str:
    """The name of the tensor in a checkpoint that holds the weight of a linear."""
    if linear.spec.expert is None:
        return _in_files(layer, f"{linear.spec.path}.weight")
    if not layer.family.expert_files:
        return _in_files(layer, linear.spec.path)
    file = dict(layer.family.expert_files)[linear.spec.part or ""]
    return layer.prefix + file.format(linear.spec.expert)


def packed_name(layer: DecoderLayer, linear: Linear) -> str:
    """The name of the tensor in a checkpoint that holds the values of a linear if it is packed."""
    if linear.spec.expert is None:
        return _in_files(layer, f"{linear.spec.path}.values")
    return f"{_packed_prefix(layer)}{linear.module_name}.values"


def _in_files(layer: DecoderLayer, name: str) -> str:
    """The name in a checkpoint of the tensor `name` of a layer."""
    return layer.prefix + layer.family.name_in_files(name)


def _packed_prefix(layer: DecoderLayer) -> str:
    """What the names of packed experts begin with in a checkpoint.

    No tensor of a layer without experts has such a name.
    """
    return _in_files(layer, f"{layer.family.experts}.{PACKED_PREFIX}")


def as_dense(layer: DecoderLayer, name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Name and tensor, as `load_stored` takes them, of a weight that a checkpoint holds packed.

    name: what the names of values and positions begin with there. weight: [out, in], or [experts, out, in].
    """
    stored = _packed_prefix(layer)
    if not name.startswith(stored):
        return f"{name}.weight", weight
    path = f"{layer.family.experts}.{name.removeprefix(stored)}"
    (transposed,) = {linear.transposed for linear in layer.family.linears if linear.path == path}
    swapped = transposed != layer.family.swapped_in_files
    return layer.prefix + path, weight.mT if swapped else weight


def _swapped(layer: DecoderLayer) -> set[str]:
    """The names in a checkpoint of the parameters of experts whose last two dimensions it has swapped."""
    if not layer.family.swapped_in_files:
        return set()
    return {_in_files(layer, linear.path) for linear in layer.family.linears if linear.expert is not None}


def stored_tensors(layer: DecoderLayer) -> dict[str, Tensor]:
    """The tensors of the layer by their names in a checkpoint, where each expert may lie by itself.

    They are views of the layer's own, some of which are not contiguous.
    """
    found = {_in_files(layer, name): tensor for name, tensor in layer.module.state_dict().items()}
    found |= {name: found[name].mT for name in _swapped(layer) if name in found}
    for linear in layer.linears.values():
        if linear.spec.expert is not None and layer.family.expert_files and linear.is_dense:
            found.pop(_in_files(layer, linear.spec.path), None)
            found[stored_name(layer, linear)] = linear.weight.detach()
    for name, parts in layer.family.parts:
        rows = found.pop(_in_files(layer, name)).chunk(len(parts))
        found |= {_in_files(layer, part): own for part, own in zip(parts, rows, strict=True)}
    return found


@torch.no_grad()
def load_stored(layer: DecoderLayer, tensors: dict[str, Tensor]) -> None:
    """Loads what `stored_tensors` gave of a layer without packed weights, or with those of `as_dense`."""
    names = {_in_files(layer, name): layer.prefix + name for name in layer.module.state_dict()}
    tensors = tensors | {name: tensors[name].mT for name in _swapped(layer)}
    own = {names.get(name, name): tensor for name, tensor in tensors.items()}
    for linear in layer.linears.values():
        name = stored_name(layer, linear)
        if linear.spec.expert is not None and layer.family.expert_files and name in own:
            linear.weight.copy_(own.pop(name))
            own[layer.prefix + linear.spec.path] = linear.parameter
    for name, parts in layer.family.parts:
        own[layer.prefix + name] = torch.cat([own.pop(_in_files(layer, part)) for part in parts])
    layer.module.load_state_dict({name.removeprefix(layer.prefix): each for name, each in own.items()})
