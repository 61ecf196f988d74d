"""`quantization_config` in config.json: whether a checkpoint is packed and has rotations between its layers.

Its keys are defined here and nowhere else. A checkpoint with dense weights and without rotations between its
layers has no `quantization_config`, so every inference engine opens it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from drot.config import BoundaryPlace, WeightFormat
from drot.core.errors import UserError
from drot.core.reading import check_schema
from drot.model.boundary import rotation_place
from drot.model.families import architecture_of, decoder_layers, module_at
from drot.model.schema import QuantizationKeys
from drot.sparse.linear import is_packed
from drot.sparse.stored_config import write_stored_form

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUANT_METHOD = "drot"
#: value of `down_basis` in the file -> place of the boundary rotation (drot/model/boundary.py)
PLACES: dict[str, BoundaryPlace] = {"own": "input", "next": "residual"}


class DrotConfig(QuantizationConfigMixin):
    """`quantization_config` of a checkpoint that drot wrote. Its attributes are the keys in the file.

    residual_rotation: whether a boundary rotation [d, d] is stored for each pair of neighbouring layers.
    down_basis: `own` if the rotation acts on the input of every layer but the first, `next` if it acts on
        the residual beside the MLP of every layer but the last.
    packed: whether the linears of the decoder layers are packed.
    dense_linears: names of linears that are not packed, such as `layers.0.mlp.down_proj`. The file has no
        such key if there are none.

    Raises UserError for any other key or value, because a later version of drot may have written it.
    """

    def __init__(
        self,
        residual_rotation: bool = False,
        down_basis: str = "own",
        packed: bool = False,
        dense_linears: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        keys = dict(residual_rotation=residual_rotation, down_basis=down_basis, packed=packed)
        if isinstance(dense_linears, tuple):
            dense_linears = list(dense_linears)
        keys |= dict(dense_linears=dense_linears) | kwargs
        check_schema(QuantizationKeys, keys, "config.json: quantization_config")
        if dense_linears and not packed:
            raise UserError(
                "config.json: dense_linears must stand beside packed: true; got packed: false: copy the file "
                "again"
            )
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # transformers has an enum of its methods
        self.residual_rotation, self.down_basis, self.packed = residual_rotation, down_basis, packed
        self.dense_linears = list(dense_linears)

    def to_dict(self) -> dict[str, Any]:
        """The keys of the file."""
        keys: dict[str, Any] = super().to_dict()
        if not self.dense_linears:  # older versions do not accept the key
            del keys["dense_linears"]
        return keys

    @property
    def boundary(self) -> BoundaryPlace | None:
        """The place of the boundary rotations; None if there are none."""
        return PLACES[self.down_basis] if self.residual_rotation else None


def quantization_config_of(config: Any) -> dict[str, Any]:
    """`quantization_config` of a model's `config` as a dict; {} if there is none."""
    entry = getattr(config, "quantization_config", None) or {}
    return entry if isinstance(entry, dict) else dict(entry.to_dict())


def boundary_of(config: Any) -> BoundaryPlace | None:
    """The place of the boundary rotations of a checkpoint with `config`; None if it has none."""
    entry = quantization_config_of(config)
    return DrotConfig(**entry).boundary if entry.get("quant_method") == QUANT_METHOD else None


def describe_model(model: "PreTrainedModel") -> None:
    """Updates `quantization_config` of `model.config`: it describes the modules that `model` has now."""
    keys: dict[str, Any] = {}
    arch = architecture_of(model.config)
    layers = decoder_layers(model, arch)
    places = {rotation_place(layer) for layer in layers}
    if place := next(iter(places - {None}), None):
        keys["residual_rotation"] = True
        if place == "residual":
            keys["down_basis"] = "next"
    if is_packed(model):
        keys["packed"] = True
        if dense := [
            name
            for index, layer in enumerate(layers)
            for name, (_, path) in zip(arch.linear_names(index).values(), arch.linears, strict=True)
            if isinstance(module_at(layer, path), nn.Linear)
        ]:
            keys["dense_linears"] = dense
    if keys:
        model.config.quantization_config = {"quant_method": QUANT_METHOD, **keys}
        write_stored_form(model.config)
    elif (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)
    elif hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def format_of(model: "PreTrainedModel") -> tuple[WeightFormat, bool]:
    """The manifest's entries `format` and `stock_architecture`: whether the model opens without drot."""
    return "packed" if is_packed(model) else "dense", not hasattr(model.config, "quantization_config")
