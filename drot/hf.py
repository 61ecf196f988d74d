"""Registers drot with transformers, so that `from_pretrained` opens checkpoints with residual rotations.

Such a checkpoint's config.json says `quantization_config: {"quant_method": "drot", ...}`; a shared
rotation, or none, needs nothing of this and loads anywhere.
"""

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from drot.architectures import architecture_of, decoder_layers
from drot.errors import UserError
from drot.surgery.residual import add_residual_rotation

QUANT_METHOD = "drot"


@register_quantization_config(QUANT_METHOD)
class DrotConfig(QuantizationConfigMixin):
    """residual_rotation: there is a stored matrix [d, d] between neighbouring layers; down_basis `own`:
    every layer but the first multiplies its input by it; `next`: every layer but the last multiplies the
    residual beside its MLP (drot/surgery/residual.py)."""

    def __init__(self, residual_rotation: bool = False, down_basis: str = "own", **kwargs: Any) -> None:
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # transformers' enum is its own methods
        if down_basis not in ("own", "next"):
            raise UserError(f"config.json: down_basis must be own or next, got {down_basis!r}: update drot")
        self.residual_rotation = residual_rotation
        self.down_basis = down_basis


@register_quantizer(QUANT_METHOD)
class DrotQuantizer(HfQuantizer):
    """Puts the residual rotations into the empty model before its weights are read."""

    requires_calibration = True
    quantization_config: DrotConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.quantization_config.residual_rotation:
            arch = architecture_of(model.config)
            inside = arch if self.quantization_config.down_basis == "next" else None
            layers = decoder_layers(model, arch)
            for layer in layers[:-1] if inside else layers[1:]:
                weight = next(layer.parameters())
                add_residual_rotation(
                    layer, model.config.hidden_size, dtype=weight.dtype, device=weight.device, inside=inside
                )
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True
