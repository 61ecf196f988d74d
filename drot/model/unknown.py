"""What drot cannot place in a model of a family that it does not know: a hint for who declares the family."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from drot.model.families import FAMILIES
from drot.model.family import Family
from drot.model.sizes import MAY_BE_ABSENT


@dataclass(frozen=True)
class NearestFamily:
    """A model next to the declaration that is nearest to it.

    nearest: the `model_type` of this declaration.
    layers: the path of the decoder layers; None if the model has no list of layers.
    unplaced: the modules with weights of a decoder layer that the declaration lacks, with their class.
    lacking: the modules of the declaration that no decoder layer has.
    """

    nearest: str
    layers: str | None
    unplaced: list[str]
    lacking: list[str]


def nearest_family(model: nn.Module) -> NearestFamily:
    """The model, which may lie on the device `meta`, next to the nearest declaration.

    A module is placed if the declaration has its path. What a module computes is not compared, but for norms,
    which are RMSNorms or LayerNorms.
    """
    path, layers = _decoder_layers(model)
    found = {name: _kind(module) for layer in layers for name, module in _with_weights(layer)}
    return max(
        (_compared(model_type, family, path, found) for model_type, family in FAMILIES.items()),
        key=lambda one: -len(one.unplaced),  # the first of several
    )


def _compared(model_type: str, family: Family, layers: str | None, found: dict[str, str]) -> NearestFamily:
    """found: path → class of the modules with weights of the decoder layers."""
    kinds: dict[str, str | None] = {}
    required: list[str] = []
    for of_layer in (*dict(family.kinds).values(), family):
        linears = [linear for group in of_layer.groups if not group.routed for linear in group.linears]
        plain = [linear.path for linear in linears]
        always = [linear.path for linear in linears if not set(linear.shape) & set(MAY_BE_ABSENT)]
        norms = (*of_layer.norms, *(of_layer.post_norms or ()))
        required = [*always, *norms]  # of the family itself, which comes last
        kinds |= dict.fromkeys(plain, "Linear")
        kinds |= dict.fromkeys(norms, "LayerNorm" if family.layer_norm else "RMSNorm")
        kinds |= dict.fromkeys(of_layer.untouched)
        beside = [path for path, _ in of_layer.readers]
        if of_layer.experts is not None:
            beside.append(of_layer.experts)
        if not any(kind == "dense" for kind, _ in of_layer.kinds):  # no layer need have experts
            required += beside
        if of_layer.experts_beside is not None:
            router, _, *norms_behind = of_layer.experts_beside
            kinds |= dict.fromkeys((router, f"{router}.proj", *norms_behind))
        kinds |= dict.fromkeys(beside)  # of a class of each family's own
    unplaced = [
        f"{path} ({kind})"
        for path, kind in found.items()
        if path not in kinds or kinds[path] not in (None, kind)
    ]
    lacking = [path for path in required if path not in found]
    return NearestFamily(model_type, layers, unplaced, lacking)


def _decoder_layers(model: nn.Module) -> tuple[str | None, list[nn.Module]]:
    """The path of the list of modules with the most weights, and the modules in it."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return None, []
    name, layers = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return name, list(layers)


def _with_weights(layer: nn.Module) -> list[tuple[str, Any]]:
    """The modules of a layer that have parameters of their own, by path."""
    return [(name, m) for name, m in layer.named_modules() if any(True for _ in m.parameters(recurse=False))]


def _kind(module: nn.Module) -> str:
    """Its class; `RMSNorm` for every norm that scales and does not shift, `LayerNorm` for every LayerNorm."""
    name = type(module).__name__
    if "LayerNorm" in name:
        return "LayerNorm"
    shapes = [parameter.dim() for parameter in module.parameters(recurse=False)]
    return "RMSNorm" if "RMSNorm" in name and shapes == [1] else name
